/// \file
/// Filters become planes in the order of the GEMM's k-tiles.
#pragma once

#include "conv/implicit/group.cuh"
#include "conv/implicit/prepare.h"

namespace cutfuse::conv::implicit {

inline constexpr int kThreads = 256;
inline constexpr int kHeldGroups = 3;  // of a filter, that a thread keeps

/// One filter, by a block or a warp. Read once if it is short.
template <int kPlanes, int kLanes>
__device__ void pack_filter(const PrepareParams& p, int32_t filter) {
  using Value = ValueOf<kPlanes>;
  const gemm::Images& images = p.images;
  const auto& strides = p.weight.strides;
  const int32_t channel_groups = images.tap_channels() / kGroup;
  const int32_t groups = images.taps() * channel_groups;
  const int64_t row = int64_t(groups) * kGroup;
  const auto* from = static_cast<const Value*>(p.weight.data) + filter * strides[0];
  auto* planes = static_cast<uint16_t*>(p.filter_planes) + filter * row;
  const int first = threadIdx.x % kLanes;
  // Lanes follow what lies side by side.
  const auto place_of = [&](int32_t group, int32_t& tap, int32_t& channel) {
    const int32_t inner = strides[1] == 1 ? channel_groups : images.taps();
    const int32_t outer = group / inner;
    tap = strides[1] == 1 ? outer : group - outer * inner;
    channel = (strides[1] == 1 ? group - outer * inner : outer) * kGroup;
  };
  const auto load = [&](int32_t group, Value(&values)[kGroup]) {
    int32_t tap, channel;
    place_of(group, tap, channel);
    const int32_t r = tap / images.kernel_w;
    load_group(from + r * strides[2] + (tap - r * images.kernel_w) * strides[3], strides[1],
               p.filters_by_fours, images.channels, channel, values);
  };
  Value held[kHeldGroups][kGroup];
  Magnitude magnitude;
#pragma unroll
  for (int i = 0; i < kHeldGroups; ++i) {
    if (first + i * kLanes < groups) load(first + i * kLanes, held[i]);
  }
  int32_t exponent = 0;
  if constexpr (kPlanes > 0) {
#pragma unroll
    for (int i = 0; i < kHeldGroups; ++i) {
      if (first + i * kLanes < groups) measure(held[i], magnitude);
    }
    for (int32_t group = first + kHeldGroups * kLanes; group < groups; group += kLanes) {
      Value values[kGroup];
      load(group, values);
      measure(values, magnitude);
    }
    magnitude = planes::merge_row<kLanes>(magnitude);
    exponent = planes::scale_exponent(magnitude.bits);
    if (first == 0) p.filter_words[filter] = 2 * exponent + (magnitude.nonfinite ? 1 : 0);
  }
  const auto store = [&](int32_t group, const Value(&values)[kGroup]) {
    uint4 hi, lo{};
    convert_group(values, exponent, !magnitude.nonfinite, hi, lo);
    int32_t tap, channel;
    place_of(group, tap, channel);
    uint16_t* to = planes + int64_t(tap) * images.tap_channels() + channel;
    *reinterpret_cast<uint4*>(to) = hi;
    if (kPlanes == 2) *reinterpret_cast<uint4*>(to + p.filters * row) = lo;
  };
#pragma unroll
  for (int i = 0; i < kHeldGroups; ++i) {
    if (first + i * kLanes < groups) store(first + i * kLanes, held[i]);
  }
  for (int32_t group = first + kHeldGroups * kLanes; group < groups; group += kLanes) {
    Value values[kGroup];
    load(group, values);
    store(group, values);
  }
}

/// Filters that a block packs: of short ones each warp has its own, or few threads would have
/// something to load (2,048 filters of 512 terms: 15 us of a conversion that took 20, H200).
__host__ __device__ inline int32_t filters_of_block(const gemm::Images& images) {
  return images.taps() * images.tap_channels() <= 1024 ? kThreads / 32 : 1;
}

/// Those of one block.
template <int kPlanes>
__device__ void pack_filters_of(const PrepareParams& p, int32_t block) {
  const int32_t together = filters_of_block(p.images);
  if (together == 1) {
    pack_filter<kPlanes, kThreads>(p, block);
  } else if (const int32_t filter = block * together + threadIdx.x / 32; filter < p.filters) {
    pack_filter<kPlanes, 32>(p, filter);
  }
}

}  // namespace cutfuse::conv::implicit
