/// \file
/// Sums of any filter, straight from x, and where a thread's results lie.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "conv/direct/params.h"
#include "device/values.cuh"
#include "program/executor.cuh"

namespace cutfuse::conv::direct {

/// What a thread's results have in common: one channel of one image.
struct Channel {
  int32_t image, group, feature;

  __device__ int64_t in_image(const Params& p) const {
    return int64_t(group) * p.features + feature;
  }
  __device__ int64_t plane(const Params& p) const { return image * p.all_features() + in_image(p); }
};

/// Element of the result at pixel `pixel` of its image.
__device__ __forceinline__ int64_t place_of(const Params& p, const Channel& channel,
                                            int64_t pixel) {
  return p.channels_last
             ? (channel.image * p.pixels() + pixel) * p.all_features() + channel.in_image(p)
             : channel.plane(p) * p.pixels() + pixel;
}

/// kCount results of one channel, for program/executor.cuh: rows are channels and columns pixels;
/// Pixels has at(i), the pixel of value i, clamped to those that exist.
template <int kCount, class Pixels>
struct Coordinates {
  static constexpr int kRows = 1;
  static constexpr int kColumnPairs = kCount / 2;
  static constexpr int kSize = kCount;
  static constexpr int kColumnPairStride = 2;
  static constexpr int kStagedOperands = 0;
  static constexpr bool kPlanes = true;

  const Params& p;
  Channel channel;
  Pixels pixels;

  __device__ __forceinline__ int64_t column(int j, int c) const {
    const int64_t first = p.channels_last ? channel.image * p.pixels() : 0;
    return first + pixels.at(2 * j + c);
  }
  __device__ __forceinline__ int64_t row_offset(int, const Operand& operand) const {
    const bool in_image = p.channels_last || operand.col_stride == 0;
    return (in_image ? channel.in_image(p) : channel.plane(p)) * operand.row_stride;
  }
  __device__ __forceinline__ int64_t legal(int64_t element) const { return element; }
};

/// The sums of results (h[i], w[i]). A tap that lies in the padding is no factor. Each row of the
/// filter is summed by itself, and what adding the rows loses is kept.
template <int kCount>
__device__ __forceinline__ void gather(const Params& p, const Channel& channel,
                                       const int32_t (&h)[kCount], const int32_t (&w)[kCount],
                                       float (&sums)[kCount]) {
  const auto& strides = p.x_strides;
  const int32_t channels = p.channels.divisor;
  int64_t x_at = channel.image * strides[0] + int64_t(channel.group) * channels * strides[1];
  int64_t filter_at = channel.group * p.filters.group + channel.feature * p.filters.k;
  float lost[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = lost[i] = 0.f;
#pragma unroll 1
  for (int32_t c = 0; c < channels; ++c, x_at += strides[1], filter_at += p.filters.c) {
#pragma unroll 1
    for (int32_t r = 0; r < p.rows.taps; ++r) {
      int32_t row[kCount];
      float sum[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        row[i] = p.rows.met(h[i], r);
        // An infinity is not lost: what overflows beside it would be one of its own in another sum.
        sum[i] = isfinite(sums[i]) ? 0.f : sums[i];
      }
#pragma unroll 1
      for (int32_t s = 0; s < p.columns.taps; ++s) {
        const float weight =
            load_value(p.filters.data, filter_at + r * p.filters.r + s * p.filters.s, p.dtype);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const int32_t column = p.columns.met(w[i], s);
          if (row[i] < 0 || column < 0) continue;
          const int64_t at = x_at + row[i] * strides[2] + column * strides[3];
          sum[i] = fmaf(load_value(p.x, at, p.dtype), weight, sum[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float before = isfinite(sums[i]) ? sums[i] : 0.f;
        const float total = before + sum[i];
        const float added = total - before;
        lost[i] += (before - (total - added)) + (sum[i] - added);
        sums[i] = total;
      }
    }
  }
  // Of infinities nothing is lost: the difference of two is NaN.
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (isfinite(sums[i])) sums[i] += lost[i];
  }
}

}  // namespace cutfuse::conv::direct
