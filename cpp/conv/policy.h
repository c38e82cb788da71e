/// \file
/// Which compiled kernel runs a convolution, and how.
#pragma once

#include "conv/shift/layout.h"
#include "cutfuse/conv.h"

namespace cutfuse::conv {

/// The cheapest policy by estimate(), with its layout; kNotSupported if none takes the problem.
Status select_policy(const FusedConvProblem& problem, const DeviceProps& device, ConvPolicy* policy,
                     shift::Layout* layout);

/// Microseconds of a call, from sizes.
double estimate(const FusedConvProblem& problem, const ConvPolicy& policy,
                const shift::Layout& layout, const DeviceProps& device) noexcept;

/// Whether a policy's planes are those that the problem's precision asks for.
bool suits(const ConvPolicy& policy, const ConvProblem& problem) noexcept;

/// The compiled instance that a policy names, for `role`, or null.
const shift::Instance* find_instance(const ConvPolicy& policy, shift::Role role) noexcept;

}  // namespace cutfuse::conv
