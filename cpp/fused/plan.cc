/// \file
/// FusedProblem x DeviceProps -> stages and one workspace arena; launch() runs them in order.
#include "fused/plan.h"

#include <algorithm>
#include <iterator>
#include <new>

#include "batch_norm/kernels.h"
#include "core/current_device.h"
#include "core/status.h"
#include "cutfuse/row_reduce.h"
#include "device/logsumexp.h"
#include "program/apply.h"
#include "program/row_limits.h"
#include "row_reduce/kernels.h"
#include "skinny/multiply.h"
#include "split/split.h"

namespace cutfuse {
namespace fused {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Elements between rows of an operand: of its planes, or of the tensor itself.
int64_t leading_of(int64_t given, int64_t k) { return given != 0 ? given : ceil_div(k, 8) * 8; }

}  // namespace

int64_t FusedPlan::partial_count() const {
  return reduces_rows() ? ceil_div(problem_.gemm.n, policy_.tile_n)
                        : ceil_div(problem_.gemm.m, kPartialRows);
}

bool FusedPlan::folds_ahead() const {
  if (exchanging_blocks_ != 0) return true;  // which also clears the arrivals
  const auto [m, n, k, precision, dtype] = problem_.gemm;
  const Program& program = problem_.program;
  const bool normalises = problem_.tail == Tail::kBatchNormEval;
  const bool affine = program.count > 0 ? gemm::is_affine(program.steps[0].op) : normalises;
  const bool many = ceil_div(m, policy_.tile_m) * ceil_div(n, policy_.tile_n) > device_.sm_count;
  return affine && !splits_k() && (many || normalises);
}

Status FusedPlan::lay_out() {
  if (empty()) {
    return {};
  }
  const auto [m, n, k, precision, dtype] = problem_.gemm;
  bool fits = true;
  const auto add_planes = [&](int64_t rows, int64_t* data, int64_t* words) -> Status {
    PlanesLayout layout;
    if (Status status = planes_layout(rows, k, planes(), &layout); !status.ok()) return status;
    fits = fits && arena_.add(layout.plane_bytes, data) && arena_.add(layout.word_bytes, words);
    return {};
  };
  if (splits_x()) {
    if (Status status = add_planes(m, &x_planes_, &x_words_); !status.ok()) return status;
  }
  if (planes() > 0 && !problem_.weight_planes) {
    if (Status status = add_planes(n, &weight_planes_, &weight_words_); !status.ok()) return status;
  }
  if (training() || reduces_rows()) {
    static_assert(sizeof(Moments) == sizeof(LogSumExpPartial));
    int64_t bytes = 0;
    fits = fits &&
           checked_multiply(reduces_rows() ? m : n, partial_count() * int64_t(sizeof(Moments)),
                            &bytes) &&
           arena_.add(bytes, &partials_);
  }
  if (splits_k()) {
    int64_t bytes = 0;
    fits = fits && checked_multiply(slice_stride(), policy_.split_k * int64_t(4), &bytes) &&
           arena_.add(bytes, &slices_);
  }
  if (folds_ahead()) fits = fits && arena_.add(n * int64_t(sizeof(float2)), &folded_);
  if (exchanging_blocks_ != 0) {
    fits = fits && arena_.add(ceil_div(n, policy_.tile_n) * int64_t(sizeof(uint32_t)), &arrivals_);
  }
  if (!fits) {
    return error(Code::kInvalidValue, "the workspace of %s needs more than 2^63 bytes",
                 to_string(problem_.gemm).c_str());
  }
  if (skinny()) return {};
  const gemm::OperandLayout layout{leading_of(problem_.x_leading, k),
                                   leading_of(problem_.weight_leading, k), links_.images};
  gemm_ = gemm::find_instance(policy_)->bind(problem_.gemm, policy_, layout, device_);
  return {};
}

Status FusedPlan::check(const FusedBuffers& buffers) const noexcept try {
  const bool linked_x = links_.reads_planes || links_.reads_images;
  const bool linked_out = links_.writes_planes;
  if ((!linked_x && buffers.x.data == nullptr) || buffers.weight.data == nullptr ||
      (!linked_out && buffers.out.data == nullptr)) {
    return error(Code::kInvalidValue, "x, weight and out must not be null");
  }
  if (arena_.size() > 0 &&
      (buffers.workspace == nullptr || reinterpret_cast<uintptr_t>(buffers.workspace) % 256 != 0)) {
    return error(Code::kInvalidValue,
                 "workspace %p must be %lld bytes of device memory aligned to 256 bytes",
                 buffers.workspace, static_cast<long long>(workspace_bytes()));
  }
  const DType dtype = problem_.gemm.dtype;
  if ((!linked_x && buffers.x.dtype != dtype) || buffers.weight.dtype != dtype ||
      (!linked_out && buffers.out.dtype != dtype)) {
    return error(Code::kInvalidValue, "x, weight and out must have the plan's dtype, %s",
                 to_string(problem_.gemm).c_str());
  }
  if (dtype != DType::kFloat32) {
    for (const ConstMatrix* operand : {&buffers.x, &buffers.weight}) {
      if (operand == &buffers.x && links_.reads_images) continue;
      const int64_t leading = operand == &buffers.x ? problem_.x_leading : problem_.weight_leading;
      CUTFUSE_CHECK(
          reinterpret_cast<uintptr_t>(operand->data) % 16 == 0 && operand->col_stride == 1 &&
              operand->row_stride == leading_of(leading, problem_.gemm.k),
          Code::kInvalidValue,
          "a 16-bit operand at %p has strides (%lld, %lld); it must be aligned to 16 bytes with "
          "strides (%lld, 1)",
          operand->data, static_cast<long long>(operand->row_stride),
          static_cast<long long>(operand->col_stride),
          static_cast<long long>(leading_of(leading, problem_.gemm.k)));
    }
  }
  if (!reduces_rows() && !linked_out && buffers.out.row_stride < problem_.gemm.n) {
    return error(Code::kInvalidValue, "out has row stride %lld, at least N=%lld is needed",
                 static_cast<long long>(buffers.out.row_stride),
                 static_cast<long long>(problem_.gemm.n));
  }
  if (problem_.weight_planes &&
      (buffers.weight_planes == nullptr || buffers.weight_words == nullptr)) {
    return error(Code::kInvalidValue, "the plan expects weight planes and words, got null");
  }
  const BatchNormBuffers& bn = buffers.batch_norm;
  if (training() && (bn.save_mean == nullptr || bn.save_invstd == nullptr)) {
    return error(Code::kInvalidValue, "training needs save_mean and save_invstd, got null");
  }
  if (training() && bn.running_mean != nullptr && bn.momentum < 0.0 &&
      bn.num_batches_tracked == nullptr) {
    return error(Code::kInvalidValue,
                 "momentum None averages over num_batches_tracked, which is null");
  }
  if ((training() && (bn.running_mean == nullptr) != (bn.running_var == nullptr)) ||
      (problem_.tail == Tail::kBatchNormEval &&
       (bn.running_mean == nullptr || bn.running_var == nullptr))) {
    return error(Code::kInvalidValue,
                 "running_mean and running_var must be given together, and always in eval");
  }
  return {};
} catch (const std::bad_alloc&) {
  return error(Code::kOutOfMemory, "no host memory to say what is wrong");
}

/// Steps and operands of the epilogue, and of the program that follows training.
Status FusedPlan::bind_programs(const FusedBuffers& buffers, gemm::EpilogueArguments* epilogue,
                                DeviceProgram* after) const noexcept {
  const BatchNormBuffers& bn = buffers.batch_norm;
  const bool eval = problem_.tail == Tail::kBatchNormEval;
  DeviceProgram& program = epilogue->program;
  if (eval) {
    program.operands[gemm::kMeanOperand] = {bn.running_mean, 0, 1, bn.running_dtype};
    program.operands[gemm::kVarOperand] = {bn.running_var, 0, 1, bn.running_dtype};
    program.operands[gemm::kBiasOperand] = {bn.bias, 0, 1, bn.affine_dtype};
    program.operand_count = bn.bias != nullptr ? 3 : 2;
    epilogue->normalises = true;
    epilogue->weight = {bn.weight, 0, 1, bn.affine_dtype};
    epilogue->eps = static_cast<float>(bn.eps);
  }
  if (Status status = append(problem_.program, buffers.operands, buffers.operand_count, &program);
      !status.ok()) {
    return status;
  }
  if (eval) {
    append(Op::kSub, gemm::kMeanOperand, &program);
    append(Op::kMul, gemm::kVarOperand, &program);
    if (bn.bias != nullptr) append(Op::kAdd, gemm::kBiasOperand, &program);
  }
  Status status = append(problem_.after, buffers.after_operands, buffers.after_operand_count,
                         training() ? after : &program);
  epilogue->affine_steps = gemm::count_affine_steps(program);
  return status;
}

Status FusedPlan::bind(const FusedBuffers& buffers, const Linked& linked, gemm::GemmCall* call,
                       DeviceProgram* after) const noexcept {
  void* workspace = buffers.workspace;
  const auto [m, n, k, precision, dtype] = problem_.gemm;
  gemm::EpilogueArguments& epilogue = call->epilogue;
  call->promotion = buffers.promotion;
  epilogue.k = k;
  epilogue.a = buffers.x;
  epilogue.b = buffers.weight;
  if (planes() == 0) {
    call->a_planes = links_.reads_images ? linked.x_planes : buffers.x.data;
    call->b_planes = buffers.weight.data;
  } else {
    call->a_planes = splits_x() ? at<void>(workspace, x_planes_) : linked.x_planes;
    call->b_planes =
        problem_.weight_planes ? buffers.weight_planes : at<void>(workspace, weight_planes_);
    epilogue.b_words =
        problem_.weight_planes ? buffers.weight_words : at<int32_t>(workspace, weight_words_);
    if (links_.reads_planes) {
      epilogue.a_exponent = gemm::kBoundedExponent;
      epilogue.a = {linked.x_planes, leading_of(0, k), 1, DType::kFloat16};
    } else {
      epilogue.a_words = splits_x() ? at<int32_t>(workspace, x_words_) : linked.x_words;
    }
    std::copy(std::begin(linked.x_strides), std::end(linked.x_strides), epilogue.x_strides);
    std::copy(std::begin(linked.weight_strides), std::end(linked.weight_strides),
              epilogue.weight_strides);
  }
  if (links_.writes_planes) {
    epilogue.out = {linked.out_planes, leading_of(0, n), DType::kFloat16};
    epilogue.out_planes = planes();
  } else if (reduces_rows()) {
    epilogue.row_partials = at<LogSumExpPartial>(workspace, partials_);
  } else {
    epilogue.out = buffers.out;
    const uintptr_t pair_bytes = 2 * static_cast<uintptr_t>(size_of(dtype));
    epilogue.out_pairs = buffers.out.row_stride % 2 == 0 &&
                         reinterpret_cast<uintptr_t>(buffers.out.data) % pair_bytes == 0;
  }
  if (training()) {
    epilogue.partials = at<Moments>(workspace, partials_);
    epilogue.partial_count = partial_count();
    // One block raises the count of batches: no other may read it, as momentum None does.
    if (exchanging_blocks_ != 0 && buffers.batch_norm.momentum >= 0.0 &&
        exchanging_blocks_ <= gemm_->resident_blocks()) {
      call->blocks = exchanging_blocks_;
      gemm::MomentExchange& exchange = epilogue.exchange;
      exchange.arrivals = at<uint32_t>(workspace, arrivals_);
      exchange.columns = static_cast<int32_t>(ceil_div(n, policy_.tile_n));
      exchange.expected = static_cast<uint32_t>(gemm::padded_tile_rows(problem_.gemm, policy_));
      exchange.batch_norm = buffers.batch_norm;
      has_bounds_only(problem_.after, &exchange.lowest, &exchange.highest);
    }
  }
  if (splits_k()) {
    epilogue.out = {at<void>(workspace, slices_), slice_row_stride(), DType::kFloat32};
    epilogue.out_pairs = true;
  }
  return bind_programs(buffers, &epilogue, after);
}

Status FusedPlan::split_operands(const FusedBuffers& buffers, void* stream) const noexcept {
  const auto [m, n, k, precision, dtype] = problem_.gemm;
  void* workspace = buffers.workspace;
  const SplitJob x{buffers.x, m, at<void>(workspace, x_planes_), at<int32_t>(workspace, x_words_)};
  const SplitJob weight{buffers.weight, n, at<void>(workspace, weight_planes_),
                        at<int32_t>(workspace, weight_words_)};
  if (splits_x()) {
    return split(x, problem_.weight_planes ? nullptr : &weight, k, planes(), stream);
  }
  return problem_.weight_planes ? Status{} : split(weight, nullptr, k, planes(), stream);
}

Status FusedPlan::launch(const FusedBuffers& buffers, const Linked& linked,
                         void* stream) const noexcept {
  if (empty()) {
    return {};
  }
  if (Status status = check(buffers); !status.ok()) return status;
  gemm::GemmCall call;
  DeviceProgram after;
  if (Status status = bind(buffers, linked, &call, &after); !status.ok()) {
    return status;
  }
  if (planes() > 0) {
    if (Status status = split_operands(buffers, stream); !status.ok()) return status;
  }
  const auto [m, n, k, precision, dtype] = problem_.gemm;
  gemm::EpilogueArguments& epilogue = call.epilogue;
  const bool exchanges = epilogue.exchange.arrivals != nullptr;
  if (exchanges || (folds_ahead() && epilogue.affine_steps > 0)) {
    auto* folded = at<float2>(buffers.workspace, folded_);
    if (Status status = gemm::fold_columns(epilogue, n, folded, stream); !status.ok()) {
      return status;
    }
    epilogue.folded = folded;
    call.follows_fold = true;
  }
  if (splits_k()) {
    const DeviceProgram program = epilogue.program;
    epilogue.program = {};
    epilogue.affine_steps = 0;
    if (Status status = skinny()
                            ? skinny::multiply(buffers.x, buffers.weight, m, n, k, policy_.split_k,
                                               epilogue.out, slice_stride(), stream)
                            : gemm_->launch(call, stream);
        !status.ok()) {
      return status;
    }
    return apply(program, epilogue.out, policy_.split_k, slice_stride(), buffers.out, m, n,
                 device_.sm_count, stream);
  }
  if (Status status = gemm_->launch(call, stream); !status.ok()) return status;
  if (reduces_rows()) {
    return row_reduce::merge(call.epilogue.row_partials, m, partial_count(), buffers.out.data,
                             buffers.out.dtype, stream);
  }
  if (!training() || exchanges) {
    return {};
  }
  if (links_.reads_images && links_.images.planes_out) {
    const batch_norm::Planes planes{buffers.out.data, buffers.out.dtype, links_.images.count, n,
                                    links_.images.out_pixels()};
    return batch_norm::normalise_planes(planes, call.epilogue.partials, partial_count(),
                                        buffers.batch_norm, after, stream);
  }
  return batch_norm::normalise(buffers.out, m, n, call.epilogue.partials, partial_count(),
                               buffers.batch_norm, after, device_.sm_count, stream);
}

Status make(const FusedProblem& problem, const DeviceProps& device, const GemmPolicy* forced,
            const Links& links, std::unique_ptr<FusedPlan>* plan) noexcept {
  if (Status status = why_not(problem, device); !status.ok()) return status;
  try {
    FusedProblem canonical = problem;
    canonical.program = canonicalise(problem.program);
    canonical.after = canonicalise(problem.after);
    const GemmPolicy policy = forced != nullptr ? *forced : select_policy(canonical, links, device);
    if (Status status = check(canonical, policy, links); !status.ok()) return status;
    auto made = std::make_unique<FusedPlan>(canonical, device, policy, links);
    if (Status status = made->lay_out(); !status.ok()) return status;
    *plan = std::move(made);
  } catch (const std::bad_alloc&) {
    return error(Code::kOutOfMemory, "no host memory for the plan");
  }
  return {};
}

}  // namespace fused

Status why_not(const FusedProblem& problem, const DeviceProps& device) noexcept {
  if (Status status = validate(problem.gemm); !status.ok()) return status;
  if (Status status = validate(problem.program, kMaxSteps); !status.ok()) return status;
  if (Status status = validate(problem.after, kMaxSteps); !status.ok()) return status;
  CUTFUSE_CHECK(problem.tail == Tail::kNone || problem.tail == Tail::kBatchNormTrain ||
                    problem.tail == Tail::kBatchNormEval || problem.tail == Tail::kLogSumExp,
                Code::kInvalidValue,
                "unknown tail %d; this build has 0 (none), 1 and 2 "
                "(batch_norm in training and in eval) and 3 (logsumexp)",
                static_cast<int>(problem.tail));
  if ((problem.tail == Tail::kNone || problem.tail == Tail::kLogSumExp) &&
      problem.after.count > 0) {
    return error(Code::kInvalidValue,
                 "%d steps after a tail that is none or logsumexp; append them to the first "
                 "program or apply them to the result",
                 problem.after.count);
  }
  if (problem.tail == Tail::kBatchNormTrain && problem.gemm.m < 2) {
    return error(Code::kInvalidValue,
                 "Expected more than 1 value per channel when training, got %lld rows",
                 static_cast<long long>(problem.gemm.m));
  }
  const int64_t n = problem.gemm.n;
  const bool passes = problem.tail == Tail::kBatchNormTrain || fused::is_skinny(problem);
  CUTFUSE_CHECK(n <= row_tile::kMaxColumns || !passes, Code::kNotSupported,
                "N=%lld: a pass over the result takes at most %lld columns; split the features",
                static_cast<long long>(n), static_cast<long long>(row_tile::kMaxColumns));
  const bool narrow = problem.gemm.dtype != DType::kFloat32;
  for (const int64_t leading : {problem.x_leading, problem.weight_leading}) {
    CUTFUSE_CHECK(leading == 0 || (narrow && leading % 8 == 0 && leading >= problem.gemm.k),
                  Code::kInvalidValue,
                  "rows %lld elements apart: 16-bit operands need a multiple of 8 that is at least "
                  "K, fp32 ones 0",
                  static_cast<long long>(leading));
  }
  return why_not(problem.gemm, device);
}

Status make_plan(const FusedProblem& problem, const DeviceProps& device, const GemmPolicy* forced,
                 Plan** plan) noexcept {
  *plan = nullptr;
  std::unique_ptr<fused::FusedPlan> made;
  if (Status status = fused::make(problem, device, forced, {}, &made); !status.ok()) return status;
  *plan = made.release();
  return {};
}

void destroy_plan(Plan* plan) noexcept { delete plan; }

Status run(const Plan& plan, const FusedBuffers& buffers, void* stream) noexcept {
  CurrentDevice device;
  if (Status status = device.enter(plan.device().index); !status.ok()) return status;
  return static_cast<const fused::FusedPlan&>(plan).launch(buffers, {}, stream);
}

}  // namespace cutfuse
