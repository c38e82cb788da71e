/// \file
/// How the patch kernel cuts a convolution into tiles.
#pragma once

#include "conv/patches/params.h"
#include "cutfuse/conv.h"

namespace cutfuse::conv::patches {

/// Kernel and geometry of a problem: the policy's, or those of the least estimate if it is null.
/// kNotSupported where none takes it.
Status lay_out(const FusedConvProblem& problem, const DeviceProps& device, const ConvPolicy* policy,
               const Instance** instance, Geometry* geometry);

/// Microseconds of a call, from sizes.
double estimate(const FusedConvProblem& problem, const Instance& instance, const Geometry& geometry,
                const DeviceProps& device) noexcept;

}  // namespace cutfuse::conv::patches
