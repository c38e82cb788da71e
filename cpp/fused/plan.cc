/// \file
/// FusedProblem x DeviceProps -> stages and one workspace arena; run() launches them in order.
#include <cuda_runtime_api.h>

#include <memory>
#include <new>
#include <string>

#include "batch_norm/kernels.h"
#include "core/checked_math.h"
#include "core/current_device.h"
#include "core/status.h"
#include "cutfuse/fused.h"
#include "cutfuse/split.h"
#include "gemm/launcher.h"
#include "split/split.h"

namespace cutfuse {
namespace {

/// Hands out aligned pieces of the workspace, in order.
class Arena {
 public:
  /// Offset of a piece of `bytes`, or false if the total overflows.
  bool add(int64_t bytes, int64_t* offset) {
    constexpr int64_t kAlignment = 256;
    *offset = size_;
    return checked_round_up(bytes, kAlignment, &bytes) && checked_add(size_, bytes, &size_);
  }
  int64_t size() const { return size_; }

 private:
  int64_t size_ = 0;
};

template <class T>
T* at(void* workspace, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(workspace) + offset);
}

class FusedPlan final : public Plan {
 public:
  FusedPlan(const FusedProblem& problem, const DeviceProps& device, const GemmPolicy& policy)
      : problem_(problem), device_(device), policy_(policy) {}

  const FusedProblem& problem() const noexcept override { return problem_; }
  const GemmPolicy& policy() const noexcept override { return policy_; }
  const DeviceProps& device() const noexcept override { return device_; }
  int64_t workspace_bytes() const noexcept override { return arena_.size(); }
  std::string describe() const override;

  Status lay_out();
  Status launch(const FusedBuffers& buffers, void* stream) const noexcept;

 private:
  FusedProblem problem_;
  DeviceProps device_;
  GemmPolicy policy_;
  Arena arena_;
  int64_t x_planes_ = 0, x_words_ = 0, weight_planes_ = 0, weight_words_ = 0, partials_ = 0;
  std::unique_ptr<gemm::Launcher> gemm_;

  bool empty() const { return problem_.gemm.m == 0 || problem_.gemm.n == 0; }
  bool training() const { return problem_.tail == Tail::kBatchNormTrain; }
  int64_t partial_count() const { return (problem_.gemm.m + kPartialRows - 1) / kPartialRows; }
  Status check(const FusedBuffers& buffers) const noexcept;
  Status bind(const FusedBuffers& buffers, gemm::GemmCall* call,
              DeviceProgram* after) const noexcept;
};

Status FusedPlan::lay_out() {
  if (empty()) {
    return {};
  }
  const auto [m, n, k, precision] = problem_.gemm;
  PlanesLayout x, weight;
  if (Status status = planes_layout(m, k, &x); !status.ok()) return status;
  if (Status status = planes_layout(n, k, &weight); !status.ok()) return status;
  bool fits = arena_.add(x.plane_bytes, &x_planes_) && arena_.add(x.word_bytes, &x_words_);
  if (!problem_.weight_planes) {
    fits = fits && arena_.add(weight.plane_bytes, &weight_planes_) &&
           arena_.add(weight.word_bytes, &weight_words_);
  }
  if (training()) {
    int64_t bytes = 0;
    fits = fits && checked_multiply(n, partial_count() * int64_t(sizeof(Moments)), &bytes) &&
           arena_.add(bytes, &partials_);
  }
  if (!fits) {
    return error(Code::kInvalidValue, "the workspace of %s needs more than 2^63 bytes",
                 to_string(problem_.gemm).c_str());
  }
  const gemm::Instance* instance = gemm::find_instance(policy_);
  if (instance == nullptr) {
    return error(Code::kNotSupported, "%s is not compiled; compiled_policies() lists what is",
                 to_string(policy_).c_str());
  }
  gemm_ = instance->bind(problem_.gemm, policy_, device_);
  return {};
}

std::string FusedPlan::describe() const {
  if (empty()) {
    return "nothing to do: the output is empty";
  }
  std::string text = problem_.weight_planes
                         ? "split x into two fp16 planes (the frozen weight has its planes)\n"
                         : "split x and weight into two fp16 planes\n";
  text += "gemm " + to_string(problem_.gemm) +
          ", three products, promoted every 64 of K: " + to_string(policy_);
  if (problem_.program.count > 0) {
    text += "\n  epilogue: " + to_string(problem_.program);
  }
  if (problem_.tail == Tail::kBatchNormEval) {
    text += "\n  epilogue: batch_norm with the running statistics";
  }
  if (training()) {
    text += "\n  epilogue: batch-norm partials of every 64 rows\n";
    text += "merge partials, update running statistics\nnormalise in place";
  }
  if (problem_.after.count > 0) {
    text += (training() ? ", then " : "\n  epilogue: ") + to_string(problem_.after);
  }
  return text;
}

Status FusedPlan::check(const FusedBuffers& buffers) const noexcept {
  if (buffers.x.data == nullptr || buffers.weight.data == nullptr || buffers.out.data == nullptr) {
    return error(Code::kInvalidValue, "x, weight and out must not be null");
  }
  if (buffers.workspace == nullptr || reinterpret_cast<uintptr_t>(buffers.workspace) % 256 != 0) {
    return error(Code::kInvalidValue,
                 "workspace %p must be %lld bytes of device memory aligned to 256 bytes",
                 buffers.workspace, static_cast<long long>(workspace_bytes()));
  }
  if (buffers.out.row_stride < problem_.gemm.n) {
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
}

/// Fills everything of the GEMM's call but the planes, and the program that follows training.
Status FusedPlan::bind(const FusedBuffers& buffers, gemm::GemmCall* call,
                       DeviceProgram* after) const noexcept {
  void* workspace = buffers.workspace;
  const BatchNormBuffers& bn = buffers.batch_norm;
  call->a_planes = at<void>(workspace, x_planes_);
  call->b_planes =
      problem_.weight_planes ? buffers.weight_planes : at<void>(workspace, weight_planes_);
  call->promotion = buffers.promotion;
  gemm::EpilogueArguments& epilogue = call->epilogue;
  epilogue.a_words = at<int32_t>(workspace, x_words_);
  epilogue.b_words =
      problem_.weight_planes ? buffers.weight_words : at<int32_t>(workspace, weight_words_);
  epilogue.a = buffers.x;
  epilogue.b = buffers.weight;
  epilogue.k = problem_.gemm.k;
  epilogue.out = buffers.out;
  epilogue.out_pairs =
      buffers.out.row_stride % 2 == 0 && reinterpret_cast<uintptr_t>(buffers.out.data) % 8 == 0;
  if (training()) {
    epilogue.partials = at<Moments>(workspace, partials_);
    epilogue.partial_count = partial_count();
  }
  DeviceProgram& program = epilogue.program;
  if (problem_.tail == Tail::kBatchNormEval) {
    program.operands[gemm::kMeanOperand] = {bn.running_mean, 0, 1};
    program.operands[gemm::kVarOperand] = {bn.running_var, 0, 1};
    program.operands[gemm::kBiasOperand] = {bn.bias, 0, 1};
    program.operand_count = bn.bias != nullptr ? 3 : 2;
    epilogue.normalises = true;
    epilogue.weight = bn.weight;
    epilogue.eps = static_cast<float>(bn.eps);
  }
  if (Status status = append(problem_.program, buffers.operands, buffers.operand_count, &program);
      !status.ok()) {
    return status;
  }
  if (problem_.tail == Tail::kBatchNormEval) {
    append(Op::kSub, gemm::kMeanOperand, &program);
    append(Op::kMul, gemm::kVarOperand, &program);
    if (bn.bias != nullptr) append(Op::kAdd, gemm::kBiasOperand, &program);
  }
  return append(problem_.after, buffers.after_operands, buffers.after_operand_count,
                training() ? after : &program);
}

Status FusedPlan::launch(const FusedBuffers& buffers, void* stream) const noexcept {
  if (empty()) {
    return {};
  }
  if (Status status = check(buffers); !status.ok()) return status;
  gemm::GemmCall call;
  DeviceProgram after;
  if (Status status = bind(buffers, &call, &after); !status.ok()) return status;

  const auto [m, n, k, precision] = problem_.gemm;
  void* workspace = buffers.workspace;
  const BatchNormBuffers& bn = buffers.batch_norm;
  const SplitJob x{buffers.x, m, at<void>(workspace, x_planes_), at<int32_t>(workspace, x_words_)};
  const SplitJob weight{buffers.weight, n, at<void>(workspace, weight_planes_),
                        at<int32_t>(workspace, weight_words_)};
  Status status = split(x, problem_.weight_planes ? nullptr : &weight, k, stream);
  if (status.ok()) {
    status = gemm_->launch(call, stream);
  }
  if (status.ok() && training()) {
    status = batch_norm::finalise(call.epilogue.partials, partial_count(), m, n, bn, stream);
  }
  if (status.ok() && training()) {
    const Normalise step{bn.save_mean, bn.save_invstd, bn.weight, bn.bias};
    status = batch_norm::normalise(buffers.out, m, n, step, after, bn.num_batches_tracked,
                                   device_.sm_count, stream);
  }
  return status;
}

}  // namespace

Status why_not(const FusedProblem& problem, const DeviceProps& device) noexcept {
  if (Status status = validate(problem.gemm); !status.ok()) return status;
  if (Status status = validate(problem.program, kMaxSteps); !status.ok()) return status;
  if (Status status = validate(problem.after, kMaxSteps); !status.ok()) return status;
  CUTFUSE_CHECK(problem.tail == Tail::kNone || problem.tail == Tail::kBatchNormTrain ||
                    problem.tail == Tail::kBatchNormEval,
                Code::kInvalidValue,
                "unknown tail %d; this build has 0 (none), 1 and 2 "
                "(batch_norm in training and in eval)",
                static_cast<int>(problem.tail));
  if (problem.tail == Tail::kNone && problem.after.count > 0) {
    return error(Code::kInvalidValue,
                 "%d steps after a tail that is none; append them to the first program",
                 problem.after.count);
  }
  if (problem.tail == Tail::kBatchNormTrain && problem.gemm.m < 2) {
    return error(Code::kInvalidValue,
                 "Expected more than 1 value per channel when training, got %lld rows",
                 static_cast<long long>(problem.gemm.m));
  }
  return why_not(problem.gemm, device);
}

Status make_plan(const FusedProblem& problem, const DeviceProps& device, const GemmPolicy* forced,
                 Plan** plan) noexcept {
  *plan = nullptr;
  if (Status status = why_not(problem, device); !status.ok()) return status;
  try {
    FusedProblem canonical = problem;
    canonical.program = canonicalise(problem.program);
    canonical.after = canonicalise(problem.after);
    auto made = std::make_unique<FusedPlan>(
        canonical, device, forced != nullptr ? *forced : select_policy(problem.gemm, device));
    if (Status status = made->lay_out(); !status.ok()) return status;
    *plan = made.release();
  } catch (const std::bad_alloc&) {
    return error(Code::kOutOfMemory, "no host memory for the plan");
  }
  return {};
}

void destroy_plan(Plan* plan) noexcept { delete plan; }

Status run(const Plan& plan, const FusedBuffers& buffers, void* stream) noexcept {
  CurrentDevice device;
  if (Status status = device.enter(plan.device().index); !status.ok()) return status;
  return static_cast<const FusedPlan&>(plan).launch(buffers, stream);
}

}  // namespace cutfuse
