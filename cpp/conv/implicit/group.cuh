/// \file
/// Eight channels of a pixel or of a filter's tap, which are 16 bytes of each plane.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "split/convert.cuh"

namespace cutfuse::conv::implicit {

using planes::kGroup;
using planes::Magnitude;

/// Of `planes` planes; none: 16-bit values as they are.
template <int planes>
using ValueOf = std::conditional_t<planes == 0, uint16_t, float>;

/// A group from `channel` on of channels whose first lies at `from`, zero where there are none.
/// by_fours: they lie side by side, aligned.
template <class Value>
__device__ void load_group(const Value* from, int64_t stride, bool by_fours, int32_t channels,
                           int32_t channel, Value (&values)[kGroup]) {
  from += channel * stride;
  if (channel + kGroup > channels) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      values[i] = channel + i < channels ? __ldg(from + i * stride) : Value(0);
    }
  } else if (sizeof(Value) == 4 && by_fours) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 four = __ldg(reinterpret_cast<const float4*>(from) + half);
      values[4 * half] = four.x;
      values[4 * half + 1] = four.y;
      values[4 * half + 2] = four.z;
      values[4 * half + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) values[i] = __ldg(from + i * stride);
  }
}

/// Takes a group into the magnitude of the whole, and returns whether all of it is finite.
template <class Value>
__device__ bool measure(const Value (&values)[kGroup], Magnitude& whole) {
  if constexpr (sizeof(Value) == 2) return true;
  const Magnitude more = planes::magnitude_of(reinterpret_cast<const float (&)[1][kGroup]>(values));
  whole = {max(whole.bits, more.bits), whole.nonfinite || more.nonfinite};
  return !more.nonfinite;
}

/// A group as it is in each plane. finite: all of it is.
template <class Value>
__device__ void convert_group(const Value (&values)[kGroup], int32_t exponent, bool finite,
                              uint4& hi, uint4& lo) {
  if constexpr (sizeof(Value) == 2) {
    auto* words = &hi.x;
#pragma unroll
    for (int i = 0; i < kGroup / 2; ++i) {
      words[i] = values[2 * i] | uint32_t(values[2 * i + 1]) << 16;
    }
  } else if (finite && exponent <= 127) {
    planes::convert<true>(values, exponent, hi, lo);
  } else {
    planes::convert(values, exponent, hi, lo);
  }
}

}  // namespace cutfuse::conv::implicit
