/// \file
/// A convolution of few channels a group by the direct kernels, which read and write tensors where
/// they lie.
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>

#include "conv/direct/layout.h"
#include "conv/plan.h"
#include "conv/policy.h"
#include "conv/problem.h"
#include "core/status.h"

namespace cutfuse::conv::direct {
namespace {

class DirectPlan final : public MechanismPlan {
 public:
  DirectPlan(const FusedConvProblem& problem, const DeviceProps& device, Direct kernel,
             const Params& params)
      : problem_(problem), device_(device), params_(params) {
    policy_.direct = kernel;
    if (normalises()) workspace_bytes_ = ceil_div(problem.conv.out_channels * 4, 256) * 256;
  }

  const FusedConvProblem& problem() const noexcept override { return problem_; }
  const ConvPolicy& policy() const noexcept override { return policy_; }
  const DeviceProps& device() const noexcept override { return device_; }
  int64_t workspace_bytes() const noexcept override { return workspace_bytes_; }
  int64_t packed_bytes() const noexcept override { return 0; }
  std::string packed_key() const override { return "as it is"; }
  std::string describe() const override;

  Status pack(const ConstTensor4&, void*, void*) const noexcept override { return {}; }
  Status launch(const ConvBuffers& buffers, void* stream) const noexcept override;

 private:
  FusedConvProblem problem_;
  DeviceProps device_;
  ConvPolicy policy_;
  Params params_;  // without pointers
  int64_t workspace_bytes_ = 0;

  bool normalises() const { return problem_.tail == Tail::kBatchNormEval; }
  Status fold_batch_norm(const ConvBuffers& buffers, void* stream) const noexcept;
  Status bind_program(const ConvBuffers& buffers, DeviceProgram* program) const noexcept;
};

std::string DirectPlan::describe() const {
  const Tile& t = params_.tile;
  std::string text = normalises() ? "fold the running statistics\n" : "";
  text += to_string(problem_.conv) + ": directly, sums of fp32, ";
  text += problem_.channels_last ? "channels_last, " : "NCHW, ";
  text += std::to_string(params_.blocks) + " blocks";
  if (policy_.direct != Direct::kAny) {
    text += " of " + std::to_string(t.groups.divisor) + " groups of " +
            std::to_string(t.features.divisor) + " results of " + std::to_string(t.rows.divisor) +
            " x " + std::to_string(t.columns) + " pixels";
  }
  if (problem_.program.count > 0) text += "\n  epilogue: " + to_string(problem_.program);
  if (normalises()) text += "\n  epilogue: batch_norm with the running statistics";
  if (problem_.after.count > 0) text += "\n  epilogue: " + to_string(problem_.after);
  return text;
}

/// Writes batch norm's multipliers.
Status DirectPlan::fold_batch_norm(const ConvBuffers& buffers, void* stream) const noexcept {
  std::unique_ptr<shift::PrepareParams> params(new (std::nothrow) shift::PrepareParams);
  CUTFUSE_CHECK(params != nullptr, Code::kOutOfMemory, "no host memory for the launch");
  params->g.groups = 1;
  params->g.out_channels = static_cast<int32_t>(problem_.conv.out_channels);
  params->multipliers = static_cast<float*>(buffers.workspace);
  params->batch_norm = buffers.batch_norm;
  return shift::prepare(*params, stream);
}

/// Operands are read by channels and pixels.
Status DirectPlan::bind_program(const ConvBuffers& buffers, DeviceProgram* program) const noexcept {
  const BatchNormBuffers& bn = buffers.batch_norm;
  if (normalises()) {
    program->operands[0] = {bn.running_mean, 1, 0, bn.running_dtype};
    program->operands[1] = {buffers.workspace, 1, 0, DType::kFloat32};
    program->operands[2] = {bn.bias, 1, 0, bn.affine_dtype};
    program->operand_count = bn.bias != nullptr ? 3 : 2;
  }
  if (Status status = append(problem_.program, buffers.operands, buffers.operand_count, program);
      !status.ok() || !normalises()) {
    return status;
  }
  append(Op::kSub, 0, program);
  append(Op::kMul, 1, program);
  if (bn.bias != nullptr) append(Op::kAdd, 2, program);
  return append(problem_.after, buffers.after_operands, buffers.after_operand_count, program);
}

/// Whether the elements of x that follow each other are, four by four, aligned loads.
bool reads_fours(const Params& p, int64_t each, int64_t side, int64_t block_channels) {
  const auto& strides = p.x_strides;
  const auto address = reinterpret_cast<uintptr_t>(p.x);
  if (p.channels_last) {
    return strides[1] == 1 && side % 4 == 0 && block_channels % 4 == 0 && strides[0] % 4 == 0 &&
           strides[2] % 4 == 0 && strides[3] % 4 == 0 && address % (4 * each) == 0;
  }
  return strides[3] == 1 && p.columns.size % 4 == 0 && strides[0] % 4 == 0 && strides[1] % 4 == 0 &&
         strides[2] % 4 == 0 && address % (4 * each) == 0;
}

/// Elements that a block's part of x spans.
int64_t span_of(const Params& p) {
  const Tile& t = p.tile;
  const int64_t last[] = {int64_t(t.groups.divisor) * p.channels.divisor - 1,
                          t.inside_rows.divisor - 1, t.inside_columns.divisor + 2};
  int64_t span = 0;
  for (int i = 0; i < 3; ++i) span += last[i] * std::abs(p.x_strides[i + 1]);
  return span;
}

Status DirectPlan::launch(const ConvBuffers& buffers, void* stream) const noexcept {
  if (normalises()) {
    if (Status status = fold_batch_norm(buffers, stream); !status.ok()) return status;
  }
  Params params = params_;
  params.x = buffers.x.data;
  for (int i = 0; i < 4; ++i) params.x_strides[i] = buffers.x.strides[i];
  params.filters = filters_of(problem_.conv, policy_.direct, buffers.weight);
  params.out = buffers.out;
  const int64_t each = size_of(params.dtype);
  params.four_at_once = reads_fours(params, each, problem_.conv.channels,
                                    int64_t(params.tile.groups.divisor) * params.channels.divisor);
  params.stores_four = params.columns.out_size % kColumns == 0 &&
                       reinterpret_cast<uintptr_t>(buffers.out) % (kColumns * each) == 0;
  if (Status status = bind_program(buffers, &params.program); !status.ok()) return status;
  if (policy_.direct == Direct::kAny) return run_any(params, stream);
  const int64_t span = span_of(params);
  CUTFUSE_CHECK(span < int64_t(1) << 31, Code::kNotSupported,
                "a block's part of x spans %lld elements; make x contiguous, so that it spans "
                "fewer than 2^31",
                static_cast<long long>(span));
  return problem_.channels_last ? run_pixels(params, stream) : run_planes(params, stream);
}

}  // namespace

Status expect(const FusedConvProblem& problem, const DeviceProps& device, double* time) {
  Direct kernel = Direct::kSelected;
  Params params;
  if (Status status = lay_out(problem, device, &kernel, &params); !status.ok()) return status;
  *time = estimate(problem, device, kernel);
  return {};
}

Status make_plan(const FusedConvProblem& problem, const DeviceProps& device,
                 const ConvPolicy* forced, std::unique_ptr<MechanismPlan>* plan) {
  Direct kernel = forced == nullptr ? Direct::kSelected : forced->direct;
  Params params;
  if (Status status = lay_out(problem, device, &kernel, &params); !status.ok()) return status;
  *plan = std::make_unique<DirectPlan>(problem, device, kernel, params);
  return {};
}

}  // namespace cutfuse::conv::direct
