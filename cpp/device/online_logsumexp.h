/// \file
/// The running state of a logsumexp, on the host and in kernels.
/// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
#pragma once

#include <cuda_runtime_api.h>  // __host__ and __device__, which are nothing to a C++ compiler

#include <cmath>

#include "device/logsumexp.h"

namespace cutfuse {

/// What is subtracted before exp: an infinite maximum is not, as inf - inf would be NaN.
__host__ __device__ inline float shift_of(float largest) {
  return fabsf(largest) == INFINITY ? 0.f : largest;
}

/// Of no values.
__host__ __device__ inline LogSumExpPartial empty_logsumexp() { return {-INFINITY, 0.f}; }

template <int kCount>
__host__ __device__ inline float largest_of(const float* v) {
  if constexpr (kCount == 1) {
    return v[0];
  } else {
    return fmaxf(largest_of<kCount / 2>(v), largest_of<kCount - kCount / 2>(v + kCount / 2));
  }
}

/// Summed pairwise: few roundings in a row.
template <int kCount>
__host__ __device__ inline float sum_of_exp(const float* v, float shift) {
  if constexpr (kCount == 1) {
    return expf(v[0] - shift);
  } else {
    return sum_of_exp<kCount / 2>(v, shift) +
           sum_of_exp<kCount - kCount / 2>(v + kCount / 2, shift);
  }
}

/// Adds kCount values; -inf adds nothing. A NaN passes fmaxf by and is kept by the sum.
template <int kCount>
__host__ __device__ inline void add_values(LogSumExpPartial& to, const float (&v)[kCount]) {
  const float max = fmaxf(to.max, largest_of<kCount>(v));
  const float shift = shift_of(max);
  // An empty state is 0 * exp(-inf), one of +inf is inf * exp(inf): neither is NaN.
  to = {max, fmaf(to.sum, expf(to.max - shift), sum_of_exp<kCount>(v, shift))};
}

/// State of the union of both. A functor, as CUB takes it.
struct MergeLogSumExp {
  __host__ __device__ LogSumExpPartial operator()(const LogSumExpPartial& a,
                                                  const LogSumExpPartial& b) const {
    // Equal maxima may be infinite; a NaN compares unequal and makes the factor NaN.
    const float factor = a.max == b.max ? 1.f : expf(-fabsf(a.max - b.max));
    const bool first = a.max >= b.max;
    const float sum = first ? fmaf(b.sum, factor, a.sum) : fmaf(a.sum, factor, b.sum);
    return {fmaxf(a.max, b.max), sum};
  }
};

__host__ __device__ inline float logsumexp_of(const LogSumExpPartial& state) {
  return logf(state.sum) + shift_of(state.max);
}

}  // namespace cutfuse
