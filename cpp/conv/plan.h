/// \file
/// The mechanisms that run a convolution. Each has why_not, why_slower and make_plan as
/// cutfuse/conv.h describes them, and expected(), the microseconds of a call; of problems that
/// check_problem() accepts and that are not empty. All but why_not() want a problem that it
/// accepts. They may throw std::bad_alloc.
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
Status why_not(const FusedConvProblem& problem, const DeviceProps& device);
Status why_slower(const FusedConvProblem& problem, const DeviceProps& device);
double expected(const FusedConvProblem& problem, const DeviceProps& device);
Status make_plan(const FusedConvProblem& problem, const DeviceProps& device,
                 const ConvPolicy* forced, std::unique_ptr<MechanismPlan>* plan);
}  // namespace shift

/// A 1x1 convolution as the product of a matrix of pixels, by the kernels of a linear layer.
namespace pointwise {
Status why_not(const FusedConvProblem& problem, const DeviceProps& device);
Status why_slower(const FusedConvProblem& problem, const DeviceProps& device);
double expected(const FusedConvProblem& problem, const DeviceProps& device);
Status make_plan(const FusedConvProblem& problem, const DeviceProps& device,
                 const ConvPolicy* forced, std::unique_ptr<MechanismPlan>* plan);
}  // namespace pointwise

/// As the product of a matrix that is gathered from images whose channels lie side by side:
/// conv/implicit/. No times were measured yet: it has a plan where a policy is forced, and no
/// more.
namespace implicit {
Status make_plan(const FusedConvProblem& problem, const DeviceProps& device,
                 const ConvPolicy* forced, std::unique_ptr<MechanismPlan>* plan);
}  // namespace implicit

/// Of few channels a group, in fp32 without tensor cores: conv/direct/. No times were measured yet:
/// it has a plan where a policy is forced, and no more.
namespace direct {
Status why_not(const FusedConvProblem& problem, const DeviceProps& device);
Status why_slower(const FusedConvProblem& problem, const DeviceProps& device);
double expected(const FusedConvProblem& problem, const DeviceProps& device);
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
