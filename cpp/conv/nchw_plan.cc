/// \file
/// A 1x1 convolution of fp32 NCHW images as they are: a GEMM whose rows are pixels. Nothing of them
/// is converted or packed before it; fused/ plans the rest, at ieee the weight's planes too.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "conv/plan.h"
#include "conv/problem.h"
#include "conv/weight_planes.h"
#include "core/status.h"
#include "cutfuse/fused.h"
#include "fused/plan.h"

namespace cutfuse::conv::nchw {
namespace {

using gemm::Images;
using shift::ceil_div;

bool is_ieee(const ConvProblem& p) { return p.precision == Precision::kIeee; }

Status as_images(const FusedConvProblem& problem, Images* images, FusedProblem* linear) {
  const ConvProblem& p = problem.conv;
  const bool plain = is_pointwise(p) && !p.transposed;
  CUTFUSE_CHECK(plain && p.dtype == DType::kFloat32 && !problem.channels_last &&
                    problem.pixel_stride == 1 && problem.tail != Tail::kBatchNormTrain,
                Code::kNotSupported,
                "%s is no product of contiguous fp32 planes without statistics",
                to_string(p).c_str());
  // The copy engine's strides are multiples of 16 bytes, and a linear layer's rows of 8 elements.
  const int64_t pixels = p.height * p.width;
  CUTFUSE_CHECK(
      is_ieee(p) ? pixels % 4 == 0 || p.channels % 4 == 0 : p.channels % 8 == 0,
      Code::kNotSupported,
      "%s: planes are read as they are if pixels or channels are a multiple of 4 or, at tf32, "
      "channels of 8",
      to_string(p).c_str());
  const double rows = double(p.batch) * (double(pixels) + gemm::kPixelGroup);
  CUTFUSE_CHECK(rows < 0x1p30, Code::kNotSupported,
                "%.0f pixels; planes of less than 2^30 are read", rows);
  images->count = static_cast<int32_t>(p.batch);
  images->channels = static_cast<int32_t>(p.channels);
  images->height = images->out_height = static_cast<int32_t>(p.height);
  images->width = images->out_width = static_cast<int32_t>(p.width);
  images->planes_in = images->planes_out = true;
  linear->gemm = {int64_t(images->count) * images->image_rows(), p.out_channels, p.channels,
                  p.precision, p.dtype};
  linear->program = problem.program;
  linear->tail = problem.tail;
  linear->after = problem.after;
  linear->weight_planes = problem.packed_weight && is_ieee(p);
  return {};
}

/// As as_images(), where the device has a kernel for it.
Status find(const FusedConvProblem& problem, const DeviceProps& device, fused::Links* links,
            FusedProblem* linear, GemmPolicy* policy) {
  links->reads_images = true;
  if (Status status = as_images(problem, &links->images, linear); !status.ok()) return status;
  if (Status status = fused::why_not_linked(*linear, device); !status.ok()) return status;
  *policy = gemm::select_policy(linear->gemm, Source::kNchw, device);
  CUTFUSE_CHECK(policy->tile_m > 0, Code::kNotSupported,
                "%s: planes are read as they are on compute capability 9.0 only",
                to_string(problem.conv).c_str());
  return {};
}

class NchwPlan final : public MechanismPlan {
 public:
  NchwPlan(const FusedConvProblem& problem, std::unique_ptr<fused::FusedPlan> plan)
      : problem_(problem), plan_(std::move(plan)) {
    policy_.gemm = plan_->policy();
    policy_.element = policy_.gemm.element;
    policy_.planes = is_ieee(problem.conv) ? 2 : 1;
  }

  Status lay_out() noexcept {
    return planes_.lay_out(plan_->problem().gemm, is_ieee(problem_.conv) ? 2 : 0);
  }

  const FusedConvProblem& problem() const noexcept override { return problem_; }
  const ConvPolicy& policy() const noexcept override { return policy_; }
  const DeviceProps& device() const noexcept override { return plan_->device(); }
  int64_t workspace_bytes() const noexcept override { return plan_->workspace_bytes(); }
  int64_t packed_bytes() const noexcept override { return planes_.bytes(); }
  std::string packed_key() const override {
    return planes_.count() == 0 ? "as it is" : std::to_string(planes_.count()) + " planes of rows";
  }
  std::string describe() const override {
    return to_string(problem_.conv) + ": a matrix product of planes as they are\n" +
           plan_->describe();
  }

  Status pack(const ConstTensor4& weight, void* packed, void* stream) const noexcept override {
    return planes_.pack(matrix(weight), plan_->problem().gemm, packed, device(), stream);
  }
  Status launch(const ConvBuffers& buffers, void* stream) const noexcept override;

 private:
  FusedConvProblem problem_;
  ConvPolicy policy_;
  std::unique_ptr<fused::FusedPlan> plan_;
  WeightPlanes planes_;

  static ConstMatrix matrix(const ConstTensor4& weight) {
    return {weight.data, weight.strides[0], weight.strides[1], DType::kFloat32};
  }
};

Status NchwPlan::launch(const ConvBuffers& buffers, void* stream) const noexcept {
  const ConvProblem& p = problem_.conv;
  const auto* x = buffers.x.data;
  const auto* weight = buffers.weight.data;
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  CUTFUSE_CHECK(aligned(x) && (is_ieee(p) || aligned(weight)), Code::kInvalidValue,
                "x at %p and, at tf32, weight at %p must be aligned to 16 bytes", x, weight);
  FusedBuffers linear;
  TurnedOperands operands;
  if (Status status = hand_on(buffers, &operands, &linear); !status.ok()) return status;
  linear.x = {x, 0, 0, p.dtype};
  linear.weight = is_ieee(p) ? matrix(buffers.weight) : ConstMatrix{weight, p.channels, 1, p.dtype};
  if (problem_.packed_weight) planes_.bind(buffers.packed, &linear);
  linear.out = {buffers.out, p.out_channels, p.dtype};
  linear.workspace = buffers.workspace;
  fused::Linked linked;
  linked.x_planes = x;
  return plan_->launch(linear, linked, stream);
}

}  // namespace

Status expect(const FusedConvProblem& problem, const DeviceProps& device, double* time) {
  fused::Links links;
  FusedProblem linear;
  GemmPolicy policy;
  if (Status status = find(problem, device, &links, &linear, &policy); !status.ok()) return status;
  const auto [m, n, k, precision, dtype] = linear.gemm;
  const auto waves =
      double(ceil_div(ceil_div(m, policy.tile_m) * ceil_div(n, policy.tile_n), device.sm_count));
  // Measured from a cold L2, of ResNet-50's layers (tf32 on an H200, ieee on an H100): us of a
  // tile, and bytes a us.
  const double bytes = 4.0 * (double(m) * double(n + k) + double(n) * double(k));
  const bool narrow = policy.tile_n == 64;
  // Planes that do not end on 16 bytes come in four times as many copies.
  const bool odd = links.images.box_step() > 1;
  if (!is_ieee(problem.conv)) {
    const double tile = (narrow ? 2.2 : 3.0) + (odd ? 0.014 : 0.0125) * double(k);
    *time = 6.0 + std::max(waves * tile, bytes / 3.7e6);
    return {};
  }
  const double k_tile =
      (narrow ? 0.65 : 1.2) * (policy.promote_k == 16 ? 1.35 : 1.0) * (odd ? 1.12 : 1.0);
  const double tile = 3.6 + double(ceil_div(k, 64)) * k_tile;
  *time = (problem.packed_weight ? 8.0 : 11.0) + std::max(waves * tile, bytes / 2.9e6);
  return {};
}

Status make_plan(const FusedConvProblem& problem, const DeviceProps& device,
                 const ConvPolicy* forced, std::unique_ptr<MechanismPlan>* plan) {
  fused::Links links;
  FusedProblem linear;
  GemmPolicy policy;
  if (Status status = find(problem, device, &links, &linear, &policy); !status.ok()) return status;
  GemmPolicy unset;
  unset.source = Source::kNchw;
  const bool selects = forced == nullptr || forced->gemm == unset;
  std::unique_ptr<fused::FusedPlan> inner;
  Status status = fused::make(linear, device, selects ? &policy : &forced->gemm, links, &inner);
  if (!status.ok()) return status;
  auto made = std::make_unique<NchwPlan>(problem, std::move(inner));
  if (status = made->lay_out(); !status.ok()) return status;
  *plan = std::move(made);
  return {};
}

}  // namespace cutfuse::conv::nchw
