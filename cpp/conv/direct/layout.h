/// \file
/// Which direct kernel takes a convolution, and how its blocks divide the result.
#pragma once

#include "conv/direct/params.h"
#include "cutfuse/conv.h"

namespace cutfuse::conv::direct {

/// Params of a problem, but for pointers, strides and what follows from them; `kernel` is what is
/// wanted, and becomes what was found. kNotSupported where it does not take the problem.
Status lay_out(const FusedConvProblem& problem, const DeviceProps& device, Direct* kernel,
               Params* params);

/// The weight as the kernel reads it.
Filters filters_of(const ConvProblem& problem, Direct kernel, const ConstTensor4& weight) noexcept;

/// Microseconds of a call, from sizes.
double estimate(const FusedConvProblem& problem, const DeviceProps& device, Direct kernel) noexcept;

}  // namespace cutfuse::conv::direct
