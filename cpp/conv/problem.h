/// \file
/// A convolution as the user gives it -> validated, and as a unit-stride problem of the grid.
#pragma once

#include "conv/shift/params.h"
#include "cutfuse/conv.h"
#include "cutfuse/status.h"

namespace cutfuse::conv {

/// kInvalidValue or kInvalidShape, with value, limit and remedy, unless sizes and arguments fit
/// each other and no product overflows.
Status validate(const ConvProblem& problem) noexcept;

/// As validate(), of programs and tail too, and kNotSupported where the build has nothing for the
/// device or a size is 2^30 and more. Where it is ok, products of two sizes fit 64 bits.
Status check_problem(const FusedConvProblem& problem, const DeviceProps& device) noexcept;

/// kNotSupported where a sum or a device has no shift kernel whatever the sizes.
Status check_sums(const FusedConvProblem& problem, const DeviceProps& device) noexcept;

/// Whether there is nothing to compute.
inline bool is_empty(const ConvProblem& p) {
  return p.batch == 0 || p.out_channels == 0 || p.out_height == 0 || p.out_width == 0;
}

/// Whether every result is of the one pixel in its place.
inline bool is_pointwise(const ConvProblem& p) {
  return p.kernel_h == 1 && p.kernel_w == 1 && p.stride_h == 1 && p.stride_w == 1 && p.pad_h == 0 &&
         p.pad_w == 0 && p.groups == 1 && p.out_height == p.height && p.out_width == p.width;
}

/// The same contraction as a convolution: a transposed one has its filter turned round and the rest
/// of the padding; of a stride, it has unit stride and interleave_of() its results.
ConvProblem as_convolution(const ConvProblem& problem) noexcept;
shift::Interleave interleave_of(const ConvProblem& problem) noexcept;

/// The weight of as_convolution(), from torch's [K, C / groups, R, S], or [C, K / groups, R, S] of
/// a transposed one.
shift::WeightView view_weight(const ConvProblem& problem, const ConstTensor4& weight) noexcept;

}  // namespace cutfuse::conv
