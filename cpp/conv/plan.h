/// \file
/// The mechanisms that run a convolution. Each has expect(), which says why it does not take a
/// problem, or else the microseconds of a call, and make_plan() as cutfuse/conv.h describes it; of
/// problems that check_problem() accepts and that are not empty. They may throw std::bad_alloc.
#pragma once

#include <memory>

#include "cutfuse/conv.h"
#include "cutfuse/fused.h"

namespace cutfuse::conv {

class MechanismPlan : public ConvPlan {
 public:
  /// As the functions of cutfuse/conv.h, which have checked what pack() is given, on the current
  /// device.
  virtual Status pack(const ConstTensor4& weight, void* packed, void* stream) const noexcept = 0;
  virtual Status launch(const ConvBuffers& buffers, void* stream) const noexcept = 0;
};

/// Straight from x, whatever its strides: conv/shift/.
namespace shift {
Status expect(const FusedConvProblem& problem, const DeviceProps& device, double* time);
Status make_plan(const FusedConvProblem& problem, const DeviceProps& device,
                 const ConvPolicy* forced, std::unique_ptr<MechanismPlan>* plan);
}  // namespace shift

/// A 1x1 convolution as the product of a matrix of pixels, by the kernels of a linear layer.
namespace pointwise {
Status expect(const FusedConvProblem& problem, const DeviceProps& device, double* time);
Status make_plan(const FusedConvProblem& problem, const DeviceProps& device,
                 const ConvPolicy* forced, std::unique_ptr<MechanismPlan>* plan);
}  // namespace pointwise

/// A 1x1 convolution of fp32 NCHW images as they are.
namespace nchw {
Status expect(const FusedConvProblem& problem, const DeviceProps& device, double* time);
Status make_plan(const FusedConvProblem& problem, const DeviceProps& device,
                 const ConvPolicy* forced, std::unique_ptr<MechanismPlan>* plan);
}  // namespace nchw

/// Contiguous fp32 NCHW by patches, all output channels at once: conv/patches/.
namespace patches {
Status expect(const FusedConvProblem& problem, const DeviceProps& device, double* time);
Status make_plan(const FusedConvProblem& problem, const DeviceProps& device,
                 const ConvPolicy* forced, std::unique_ptr<MechanismPlan>* plan);
}  // namespace patches

/// As the product of a matrix that is gathered from images whose channels lie side by side:
/// conv/implicit/.
namespace implicit {
Status expect(const FusedConvProblem& problem, const DeviceProps& device, double* time);
Status make_plan(const FusedConvProblem& problem, const DeviceProps& device,
                 const ConvPolicy* forced, std::unique_ptr<MechanismPlan>* plan);
}  // namespace implicit

/// Of few channels a group, in fp32 without tensor cores: conv/direct/.
namespace direct {
Status expect(const FusedConvProblem& problem, const DeviceProps& device, double* time);
Status make_plan(const FusedConvProblem& problem, const DeviceProps& device,
                 const ConvPolicy* forced, std::unique_ptr<MechanismPlan>* plan);
}  // namespace direct

/// Operands with strides as those of rows and columns: of pixels and channels.
struct TurnedOperands {
  Operand program[kMaxSteps], after[kMaxSteps];
};

/// What a plan of pixels as rows takes over from a call of a convolution: all but x, weight, out
/// and workspace. `linear` points into `operands` then.
Status hand_on(const ConvBuffers& buffers, TurnedOperands* operands, FusedBuffers* linear) noexcept;

}  // namespace cutfuse::conv
