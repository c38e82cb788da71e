/// \file
/// A 1x1 convolution as a linear layer of its pixels: problem and buffers in the words of
/// cutfuse/fused.h, whose plan does the rest.
#include <memory>
#include <string>
#include <utility>

#include "conv/plan.h"
#include "conv/problem.h"
#include "conv/weight_planes.h"
#include "core/status.h"
#include "cutfuse/fused.h"
#include "fused/estimate.h"

namespace cutfuse::conv::pointwise {
namespace {

/// Rows are pixels and columns output channels.
Status as_linear(const FusedConvProblem& problem, FusedProblem* linear) {
  const ConvProblem& p = problem.conv;
  const bool narrow = p.dtype != DType::kFloat32;
  // The channels of a transposed convolution's weight lie apart.
  const bool readable = !narrow || (!p.transposed && p.channels % 8 == 0);
  const bool rows = problem.channels_last || p.height * p.width == 1;
  CUTFUSE_CHECK(is_pointwise(p) && readable && rows && problem.pixel_stride > 0,
                Code::kNotSupported, "%s is no matrix product of pixels", to_string(p).c_str());
  linear->gemm = {p.batch * p.height * p.width, p.out_channels, p.channels, p.precision, p.dtype};
  linear->program = problem.program;
  linear->tail = problem.tail;
  linear->after = problem.after;
  linear->weight_planes = problem.packed_weight && !narrow;
  linear->x_leading = narrow ? problem.pixel_stride : 0;
  linear->weight_leading = narrow ? p.channels : 0;
  return {};
}

struct PlanDeleter {
  void operator()(Plan* plan) const { destroy_plan(plan); }
};

class PointwisePlan final : public MechanismPlan {
 public:
  PointwisePlan(const FusedConvProblem& problem, Plan* plan) : problem_(problem), plan_(plan) {
    policy_.gemm = plan->policy();
  }

  const FusedConvProblem& problem() const noexcept override { return problem_; }
  const ConvPolicy& policy() const noexcept override { return policy_; }
  const DeviceProps& device() const noexcept override { return plan_->device(); }
  int64_t workspace_bytes() const noexcept override { return plan_->workspace_bytes(); }
  int64_t packed_bytes() const noexcept override { return planes_.bytes(); }
  std::string packed_key() const override {
    return std::to_string(planes_.count()) + " planes of rows";
  }
  std::string describe() const override {
    return to_string(problem_.conv) + ": a matrix product of its pixels\n" + plan_->describe();
  }

  Status lay_out() noexcept;
  Status pack(const ConstTensor4& weight, void* packed, void* stream) const noexcept override;
  Status launch(const ConvBuffers& buffers, void* stream) const noexcept override;

 private:
  FusedConvProblem problem_;
  ConvPolicy policy_;
  std::unique_ptr<Plan, PlanDeleter> plan_;
  WeightPlanes planes_;

  ConstMatrix matrix(const ConstTensor4& weight) const noexcept;
};

Status PointwisePlan::lay_out() noexcept {
  const GemmProblem& gemm = plan_->problem().gemm;
  return planes_.lay_out(gemm, policy_.gemm.arch < 80 ? 0 : plane_count(gemm));
}

ConstMatrix PointwisePlan::matrix(const ConstTensor4& weight) const noexcept {
  const ConvProblem& p = problem_.conv;
  if (p.transposed) return {weight.data, weight.strides[1], weight.strides[0], p.dtype};
  // The stride of a dimension of size one says nothing.
  const bool narrow = p.dtype != DType::kFloat32;
  return {weight.data, narrow ? p.channels : weight.strides[0], weight.strides[1], p.dtype};
}

Status PointwisePlan::pack(const ConstTensor4& weight, void* packed, void* stream) const noexcept {
  return planes_.pack(matrix(weight), plan_->problem().gemm, packed, plan_->device(), stream);
}

Status PointwisePlan::launch(const ConvBuffers& buffers, void* stream) const noexcept {
  FusedBuffers linear;
  TurnedOperands operands;
  if (Status status = hand_on(buffers, &operands, &linear); !status.ok()) return status;
  linear.x = {buffers.x.data, problem_.pixel_stride, buffers.x.strides[1], problem_.conv.dtype};
  linear.weight = matrix(buffers.weight);
  if (problem_.packed_weight) planes_.bind(buffers.packed, &linear);
  linear.out = {buffers.out, problem_.conv.out_channels, problem_.conv.dtype};
  linear.workspace = buffers.workspace;
  return run(*plan_, linear, stream);
}

}  // namespace

Status expect(const FusedConvProblem& problem, const DeviceProps& device, double* time) {
  FusedProblem linear;
  if (Status status = as_linear(problem, &linear); !status.ok()) return status;
  if (Status status = fused::why_not_linked(linear, device); !status.ok()) return status;
  // From a cold L2, where linear layers were timed from a warm one, and short rows are split
  // slowly.
  const bool split = problem.conv.dtype == DType::kFloat32;
  const double rows = split && linear.gemm.k < 128 ? 2.5e-4 * double(linear.gemm.m) : 0.0;
  *time = fused::expected(linear, {}, fused::select_large_policy(linear, {}, device), device) +
          2.0 + rows;
  return {};
}

Status make_plan(const FusedConvProblem& problem, const DeviceProps& device,
                 const ConvPolicy* forced, std::unique_ptr<MechanismPlan>* plan) {
  FusedProblem linear;
  if (Status status = as_linear(problem, &linear); !status.ok()) return status;
  const bool selects = forced == nullptr || forced->gemm == GemmPolicy{};
  if (Status status = fused::why_not_linked(linear, device); !status.ok()) return status;
  const GemmPolicy policy = selects ? fused::select_large_policy(linear, {}, device) : forced->gemm;
  Plan* inner = nullptr;
  if (Status status = cutfuse::make_plan(linear, device, &policy, &inner); !status.ok()) {
    return status;
  }
  auto made = std::make_unique<PointwisePlan>(problem, inner);
  if (Status status = made->lay_out(); !status.ok()) return status;
  *plan = std::move(made);
  return {};
}

}  // namespace cutfuse::conv::pointwise
