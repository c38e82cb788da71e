/// \file
/// A convolution by the patch kernel: contiguous fp32 NCHW as it is, all output channels at once.
#include <algorithm>
#include <iterator>
#include <memory>
#include <new>
#include <string>

#include "conv/patches/layout.h"
#include "conv/plan.h"
#include "conv/problem.h"
#include "core/driver.h"
#include "core/status.h"
#include "fused/plan.h"

namespace cutfuse::conv::patches {
namespace {

class PatchPlan final : public MechanismPlan {
 public:
  PatchPlan(const FusedConvProblem& problem, const DeviceProps& device, const Instance& instance,
            const Geometry& geometry)
      : problem_(problem), device_(device), instance_(instance), g_(geometry) {
    policy_.patch_n = instance.columns;
    policy_.planes = instance.planes;
    policy_.gemm.source = Source::kNchw;
    words_at_ = int64_t(g_.slabs()) * slab_bytes(instance.columns, instance.planes);
    linear_.gemm = {int64_t(g_.batch) * g_.out_pixels(), g_.out_channels, g_.terms,
                    problem.conv.precision, problem.conv.dtype};
    linear_.program = problem.program;
    linear_.tail = problem.tail;
    linear_.after = problem.after;
  }

  const FusedConvProblem& problem() const noexcept override { return problem_; }
  const ConvPolicy& policy() const noexcept override { return policy_; }
  const DeviceProps& device() const noexcept override { return device_; }
  int64_t workspace_bytes() const noexcept override {
    return problem_.packed_weight ? 0 : packed_bytes();
  }
  int64_t packed_bytes() const noexcept override {
    return shift::ceil_div(words_at_ + int64_t(instance_.columns) * 4, 256) * 256;
  }
  std::string packed_key() const override {
    return std::to_string(instance_.planes) + " planes of " + std::to_string(instance_.columns) +
           " rows of sums";
  }
  std::string describe() const override;

  Status pack(const ConstTensor4& weight, void* packed, void* stream) const noexcept override;
  Status launch(const ConvBuffers& buffers, void* stream) const noexcept override;

 private:
  FusedConvProblem problem_;
  DeviceProps device_;
  const Instance& instance_;
  Geometry g_;
  FusedProblem linear_;  ///< of pixels as rows
  ConvPolicy policy_;
  int64_t words_at_ = 0;  ///< in what is packed

  Status bind(const ConvBuffers& buffers, const void* packed, Params* params) const noexcept;
};

std::string PatchPlan::describe() const {
  std::string text = problem_.packed_weight ? "" : "pack the weight\n";
  text += to_string(problem_.conv) + ": patches as they are, ";
  for (const Part& part : g_.parts) {
    if (part.tiles() == 0) continue;
    text += (part.first > 0 ? " and " : "") + std::to_string(g_.batch * part.tiles()) +
            " tiles of " + std::to_string(part.block_h()) + " x " + std::to_string(part.block_w());
  }
  text += " pixels by " + std::to_string(instance_.columns) + " channels, " +
          (instance_.planes == 1 ? "1 plane" : "2 planes");
  if (instance_.planes == 2) {
    text += "; what is below 2^-10 of the largest input in its patch loses accuracy";
  }
  if (problem_.program.count > 0) text += "\n  epilogue: " + to_string(problem_.program);
  if (problem_.tail == Tail::kBatchNormEval) {
    text += "\n  epilogue: batch_norm with the running statistics";
  }
  if (problem_.after.count > 0) text += "\n  epilogue: " + to_string(problem_.after);
  return text;
}

Status PatchPlan::pack(const ConstTensor4& weight, void* packed, void* stream) const noexcept {
  PackParams params;
  params.g = g_;
  params.weight = view_weight(problem_.conv, weight);
  params.columns = instance_.columns;
  params.planes = instance_.planes;
  params.packed = packed;
  params.words = fused::at<int32_t>(packed, words_at_);
  return patches::pack(params, stream);
}

Status PatchPlan::bind(const ConvBuffers& buffers, const void* packed,
                       Params* params) const noexcept {
  params->g = g_;
  params->packed = packed;
  params->x_is_complete = !problem_.packed_weight;
  params->promotion = buffers.promotion;
  gemm::EpilogueArguments& epilogue = params->epilogue;
  FusedBuffers linear;
  TurnedOperands operands;
  if (Status status = hand_on(buffers, &operands, &linear); !status.ok()) return status;
  DeviceProgram after;  // only training has one
  if (Status status = fused::bind_programs(linear_, linear, &epilogue, &after); !status.ok()) {
    return status;
  }
  const shift::WeightView weight = view_weight(problem_.conv, buffers.weight);
  const int64_t weight_strides[] = {weight.k, weight.c, weight.r, weight.s};
  std::copy(std::begin(weight_strides), std::end(weight_strides), epilogue.weight_strides);
  epilogue.a.data = buffers.x.data;
  epilogue.b.data = weight.data;
  epilogue.out.data = buffers.out;
  epilogue.b_words = reinterpret_cast<const int32_t*>(static_cast<const char*>(packed) + words_at_);
  if (g_.copied) return {};
  const int64_t plane = int64_t(g_.height) * g_.width;
  TensorBoxes boxes;
  boxes.data = buffers.x.data;
  boxes.sizes = {g_.width, g_.height, g_.channels, g_.batch, 1};
  boxes.strides = {1, g_.width, plane, g_.channels * plane, 0};
  for (int i = 0; i < g_.tables(); ++i) {
    boxes.box = {g_.parts[i].box_w, g_.parts[i].box_h, g_.channels, 1, 1};
    if (Status status = encode_boxes(boxes, &params->maps[i]); !status.ok()) return status;
  }
  return {};
}

Status PatchPlan::launch(const ConvBuffers& buffers, void* stream) const noexcept {
  const int alignment = g_.copied ? 4 : 16;
  CUTFUSE_CHECK(reinterpret_cast<uintptr_t>(buffers.x.data) % alignment == 0, Code::kInvalidValue,
                "x at %p must be aligned to %d bytes", buffers.x.data, alignment);
  if (!problem_.packed_weight) {
    if (Status status = pack(buffers.weight, buffers.workspace, stream); !status.ok()) {
      return status;
    }
  }
  std::unique_ptr<Params> params(new (std::nothrow) Params);
  CUTFUSE_CHECK(params != nullptr, Code::kOutOfMemory, "no host memory for the launch");
  const void* packed = problem_.packed_weight ? buffers.packed : buffers.workspace;
  if (Status status = bind(buffers, packed, params.get()); !status.ok()) return status;
  return instance_.launch(*params, device_, stream);
}

}  // namespace

Status expect(const FusedConvProblem& problem, const DeviceProps& device, double* time) {
  const Instance* instance = nullptr;
  Geometry geometry;
  if (Status status = lay_out(problem, device, nullptr, &instance, &geometry); !status.ok()) {
    return status;
  }
  *time = estimate(problem, *instance, geometry, device);
  return {};
}

Status make_plan(const FusedConvProblem& problem, const DeviceProps& device,
                 const ConvPolicy* forced, std::unique_ptr<MechanismPlan>* plan) {
  const Instance* instance = nullptr;
  Geometry geometry;
  if (Status status = lay_out(problem, device, forced, &instance, &geometry); !status.ok()) {
    return status;
  }
  *plan = std::make_unique<PatchPlan>(problem, device, *instance, geometry);
  return {};
}

}  // namespace cutfuse::conv::patches
