/// \file
/// A convolution by the shift kernels: stages and one workspace; launch() runs them in order.
#include <algorithm>
#include <new>
#include <utility>

#include "batch_norm/kernels.h"
#include "conv/bind.h"
#include "conv/plan.h"
#include "conv/problem.h"
#include "core/status.h"

namespace cutfuse::conv {
namespace {

constexpr int64_t kAlignment = 256;

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

template <class T>
T* at(void* base, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}
template <class T>
T* at(const void* base, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<const char*>(base) + offset);
}

class ShiftPlan final : public MechanismPlan {
 public:
  ShiftPlan(const FusedConvProblem& problem, const DeviceProps& device, const ConvPolicy& policy,
            shift::Layout layout)
      : problem_(problem),
        device_(device),
        policy_(policy),
        layout_(std::move(layout)),
        walk_{layout_.walk(device.sm_count, false), layout_.walk(device.sm_count, true)} {
    const shift::Geometry& g = layout_.g;
    tile_bytes_ = aligned(layout_.outer() * g.slabs * layout_.shared.slab_bytes);
    packed_bytes_ = tile_bytes_ + aligned(layout_.outer() * g.weight_rows * 4);
    if (!problem_.packed_weight) workspace_bytes_ = packed_bytes_;
    const int64_t channels = problem_.conv.out_channels;
    if (problem_.tail != Tail::kNone) {
      multipliers_ = workspace_bytes_;
      workspace_bytes_ += aligned(channels * 4);
    }
    if (training()) {
      partial_count_ = static_cast<int32_t>(int64_t(device_.sm_count) * (2 / g.m_blocks) * g.stack);
      partials_ = workspace_bytes_;
      workspace_bytes_ += aligned(partial_bytes());
    }
  }

  const FusedConvProblem& problem() const noexcept override { return problem_; }
  const ConvPolicy& policy() const noexcept override { return policy_; }
  const DeviceProps& device() const noexcept override { return device_; }
  int64_t workspace_bytes() const noexcept override { return workspace_bytes_; }
  int64_t packed_bytes() const noexcept override { return packed_bytes_; }
  std::string packed_key() const override;
  std::string describe() const override;

  Status pack(const ConstTensor4& weight, void* packed, void* stream) const noexcept override;
  Status launch(const ConvBuffers& buffers, void* stream) const noexcept override;

 private:
  FusedConvProblem problem_;
  DeviceProps device_;
  ConvPolicy policy_;
  shift::Layout layout_;
  int32_t walk_[2];  // of statistics, and of results that are stored
  int64_t tile_bytes_ = 0, packed_bytes_ = 0, workspace_bytes_ = 0;
  int64_t multipliers_ = 0, partials_ = 0;
  int32_t partial_count_ = 0;

  bool training() const { return problem_.tail == Tail::kBatchNormTrain; }
  int64_t partial_bytes() const {
    return problem_.conv.out_channels * partial_count_ * int64_t(sizeof(CountedMoments));
  }
  std::unique_ptr<shift::PrepareParams> prepare_params(const ConstTensor4& weight,
                                                       void* packed) const noexcept;
  Status multiply(shift::Params* params, void* stream) const noexcept;
  Status bind_programs(const ConvBuffers& buffers, bool normalises,
                       DeviceProgram* program) const noexcept;
};

std::string ShiftPlan::packed_key() const {
  std::string key = to_string(policy_);
  const shift::Geometry& g = layout_.g;
  // What channels and taps a row of the weights has, and in which order.
  for (const int32_t number :
       {static_cast<int32_t>(problem_.conv.dtype), g.pitch, g.patch, g.lane_groups,
        int32_t(g.rows_first), g.stack, g.groups, g.channels, g.out_channels, g.kernel_h,
        g.kernel_w, g.stride_h, g.stride_w, g.dilation_h, g.dilation_w, g.made.up_h, g.made.up_w,
        g.made.kernel_h, g.made.kernel_w})
    key += " " + std::to_string(number);
  if (g.ring_rows > 0) key += " row by row";
  return key + (problem_.conv.transposed ? " transposed" : "");
}

std::string ShiftPlan::describe() const {
  const shift::Geometry& g = layout_.g;
  std::string text = problem_.packed_weight ? "the frozen weight is packed\n" : "pack weight\n";
  text += to_string(problem_.conv) + ": " + to_string(policy_) + ", straight from " +
          (problem_.channels_last ? "the input to channels_last" : "the input to NCHW");
  text += ", " + std::to_string(layout_.tile_count) + " tiles of " + std::to_string(g.tile_blocks) +
          " x " + (g.stack > 1 ? std::to_string(g.stack) + " rows of " : "") +
          std::to_string(g.block_outputs) + " results of " +
          std::to_string(std::min(g.out_channels, g.m_blocks * 64)) + " channels";
  if (walk_[true] > 1) text += ", " + std::to_string(walk_[true]) + " one below the other";
  if (g.ring_rows > 0) text += " in a ring of " + std::to_string(g.ring_rows) + " rows";
  if (policy_.planes == 2) {
    const int32_t once = layout_.steps_at_once;
    text += layout_.four_products() ? ", four" : ", three";
    text += " products, promoted every " + std::to_string(16 * once) + " of K";
    text += "; what is below 2^-10 of the largest input in its tile loses accuracy";
  }
  if (!weights_stay(g)) text += ", weights streamed";
  // A pixel's channels come together only where they are whole vectors.
  if (g.piece_rows > 0 && (!problem_.channels_last || problem_.conv.channels % 4 == 0)) {
    text += ", x in " + std::to_string(g.pieces) + " pieces of " + std::to_string(g.piece_rows) +
            " rows where it is contiguous";
  }
  if (problem_.program.count > 0) text += "\n  epilogue: " + to_string(problem_.program);
  if (problem_.tail == Tail::kBatchNormEval) {
    text += "\n  epilogue: batch_norm with the running statistics";
  }
  if (training()) {
    text +=
        ": statistics only\nmerge partials, update running statistics\nthe convolution again\n"
        "  epilogue: batch_norm with the batch's statistics";
  }
  if (problem_.after.count > 0) text += "\n  epilogue: " + to_string(problem_.after);
  return text;
}

std::unique_ptr<shift::PrepareParams> ShiftPlan::prepare_params(const ConstTensor4& weight,
                                                                void* packed) const noexcept {
  std::unique_ptr<shift::PrepareParams> params(new (std::nothrow) shift::PrepareParams);
  if (params == nullptr) return nullptr;
  params->g = layout_.g;
  params->weight = view_weight(problem_.conv, weight);
  params->dtype = problem_.conv.dtype;
  params->planes = policy_.planes;
  params->element = policy_.element;
  params->steps = layout_.padded_steps();
  params->packed = packed;
  if (packed != nullptr) params->exponents = at<int32_t>(packed, tile_bytes_);
  std::copy(layout_.halves.begin(), layout_.halves.end(), params->halves);
  return params;
}

Status ShiftPlan::pack(const ConstTensor4& weight, void* packed, void* stream) const noexcept {
  const auto params = prepare_params(weight, packed);
  CUTFUSE_CHECK(params != nullptr, Code::kOutOfMemory, "no host memory for the launch");
  return shift::prepare(*params, stream);
}

/// The whole program with batch norm's step, or, for statistics, only what comes before it.
Status ShiftPlan::bind_programs(const ConvBuffers& buffers, bool normalises,
                                DeviceProgram* program) const noexcept {
  const BatchNormBuffers& bn = buffers.batch_norm;
  if (normalises) {
    const void* mean = training() ? bn.save_mean : bn.running_mean;
    const DType dtype = training() ? DType::kFloat32 : bn.running_dtype;
    program->operands[0] = {mean, 1, 0, dtype};
    program->operands[1] = {at<float>(buffers.workspace, multipliers_), 1, 0, DType::kFloat32};
    program->operands[2] = {bn.bias, 1, 0, bn.affine_dtype};
    program->operand_count = bn.bias != nullptr ? 3 : 2;
  }
  if (Status status = append(problem_.program, buffers.operands, buffers.operand_count, program);
      !status.ok()) {
    return status;
  }
  if (!normalises) return {};
  append(Op::kSub, 0, program);
  append(Op::kMul, 1, program);
  if (bn.bias != nullptr) append(Op::kAdd, 2, program);
  return append(problem_.after, buffers.after_operands, buffers.after_operand_count, program);
}

/// Leading steps that are one value a channel.
int32_t count_affine_steps(const DeviceProgram& program) noexcept {
  int32_t count = 0;
  for (; count < program.count; ++count) {
    const Step& step = program.steps[count];
    const bool affine = step.op == Op::kAdd || step.op == Op::kSub || step.op == Op::kMul;
    if (!affine || (step.operand >= 0 && program.operands[step.operand].col_stride != 0)) break;
  }
  return count;
}

/// Launches the kernel for the program that `params` has.
Status ShiftPlan::multiply(shift::Params* params, void* stream) const noexcept try {
  const bool stores = params->partials == nullptr;
  params->walk = walk_[stores];
  params->walks = static_cast<int32_t>(layout_.walks(params->walk));
  const DeviceProgram& program = params->program;
  params->affine_steps = count_affine_steps(program);
  params->clamps =
      params->affine_steps < program.count &&
      bounds_of(program.steps[params->affine_steps], &params->lowest, &params->highest);
  params->first_staged = params->affine_steps + (params->clamps ? 1 : 0);
  const bool last = params->channels_last && layout_.g.made.phases() == 1;
  const bool needs_any = params->first_staged < program.count || (stores && !params->in_runs);
  const shift::Role role = stores && last ? shift::Role::kLast
                           : needs_any    ? shift::Role::kAny
                           : stores       ? shift::Role::kStore
                                          : shift::Role::kStatistics;
  const shift::Instance* instance = find_instance(policy_, role);
  CUTFUSE_CHECK(instance != nullptr, Code::kNotSupported, "%s is not compiled",
                to_string(policy_).c_str());
  return instance->launch(*params, device_, stream);
} catch (const std::bad_alloc&) {
  return error(Code::kOutOfMemory, "no host memory to say what is wrong");
}

Status ShiftPlan::launch(const ConvBuffers& buffers, void* stream) const noexcept {
  const bool eval = problem_.tail == Tail::kBatchNormEval;
  auto* partials = training() ? at<CountedMoments>(buffers.workspace, partials_) : nullptr;
  if (!problem_.packed_weight || problem_.tail != Tail::kNone) {
    const auto prepared =
        prepare_params(buffers.weight, problem_.packed_weight ? nullptr : buffers.workspace);
    CUTFUSE_CHECK(prepared != nullptr, Code::kOutOfMemory, "no host memory for the launch");
    if (eval) prepared->multipliers = at<float>(buffers.workspace, multipliers_);
    prepared->batch_norm = buffers.batch_norm;
    prepared->cleared = reinterpret_cast<uint32_t*>(partials);
    prepared->cleared_words = training() ? partial_bytes() / 4 : 0;
    if (Status status = shift::prepare(*prepared, stream); !status.ok()) return status;
  }
  std::unique_ptr<shift::Params> params(new (std::nothrow) shift::Params);
  CUTFUSE_CHECK(params != nullptr, Code::kOutOfMemory, "no host memory for the launch");
  params->x_is_complete = !problem_.packed_weight || problem_.tail != Tail::kNone;
  const void* packed = problem_.packed_weight ? buffers.packed : buffers.workspace;
  const PackedWeight weight{packed, at<const int32_t>(packed, tile_bytes_)};
  if (Status status = bind(problem_, policy_, layout_, buffers, weight, params.get());
      !status.ok()) {
    return status;
  }
  if (training()) {
    if (Status status = bind_programs(buffers, false, &params->program); !status.ok())
      return status;
    params->partials = partials;
    params->partial_count = partial_count_;
    if (Status status = multiply(params.get(), stream); !status.ok()) return status;
    params->partials = nullptr;
    params->program = DeviceProgram{};
    if (Status status = batch_norm::finalise(partials, partial_count_, problem_.conv.out_channels,
                                             buffers.batch_norm,
                                             at<float>(buffers.workspace, multipliers_), stream);
        !status.ok()) {
      return status;
    }
  }
  if (Status status = bind_programs(buffers, problem_.tail != Tail::kNone, &params->program);
      !status.ok()) {
    return status;
  }
  return multiply(params.get(), stream);
}

}  // namespace

namespace shift {

Status expect(const FusedConvProblem& problem, const DeviceProps& device, double* time) {
  if (Status status = check_sums(problem, device); !status.ok()) return status;
  ConvPolicy policy;
  Layout layout;
  if (Status status = select_policy(problem, device, &policy, &layout); !status.ok()) {
    return status;
  }
  *time = estimate(problem, policy, layout, device);
  return {};
}

Status make_plan(const FusedConvProblem& problem, const DeviceProps& device,
                 const ConvPolicy* forced, std::unique_ptr<MechanismPlan>* plan) {
  if (Status status = check_sums(problem, device); !status.ok()) return status;
  ConvPolicy policy;
  Layout layout;
  if (forced == nullptr) {
    if (Status status = select_policy(problem, device, &policy, &layout); !status.ok()) {
      return status;
    }
  } else {
    policy = *forced;
    CUTFUSE_CHECK(find_instance(policy, Role::kStore) != nullptr, Code::kNotSupported,
                  "%s is not compiled", to_string(policy).c_str());
    CUTFUSE_CHECK(suits(policy, problem.conv), Code::kNotSupported, "%s has not the planes of %s",
                  to_string(policy).c_str(), to_string(problem.conv).c_str());
    if (Status status = lay_out(problem.conv, policy, device, &layout); !status.ok()) return status;
  }
  *plan = std::make_unique<ShiftPlan>(problem, device, policy, std::move(layout));
  return {};
}

}  // namespace shift
}  // namespace cutfuse::conv
