/// \file
/// What a block of a window kernel brings to shared memory, as fp32: a patch of x, with zeros where
/// the image has no pixel, and weights.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "conv/direct/params.h"
#include "device/values.cuh"

namespace cutfuse::conv::direct {

/// A block's first result.
struct Corner {
  int32_t image, group, feature, row, column;
};

/// kEach neighbours, one aligned load.
template <int kEach>
__device__ __forceinline__ void load(const void* data, int64_t at, DType dtype,
                                     float (&values)[kEach]) {
  static_assert(kEach == 1 || kEach == 4);
  if constexpr (kEach == 1) {
    values[0] = load_value(data, at, dtype);
  } else if (dtype == DType::kFloat32) {
    const float4 four =
        __ldg(reinterpret_cast<const float4*>(static_cast<const float*>(data) + at));
    values[0] = four.x;
    values[1] = four.y;
    values[2] = four.z;
    values[3] = four.w;
  } else {
    const uint2 words =
        __ldg(reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(data) + at));
    const float2 low = unpack_pair(words.x, dtype), high = unpack_pair(words.y, dtype);
    values[0] = low.x;
    values[1] = low.y;
    values[2] = high.x;
    values[3] = high.y;
  }
}

/// Where a unit of x lies, from where its block begins, and where it goes in the patch; to < 0:
/// there is none.
struct Unit {
  int32_t from, to;
};

/// Calls keep(to, values) for units find(n), n < count, `step` from each other. Loads of several
/// are on their way at once: 16 elements.
template <int kEach, class Find, class Keep>
__device__ __forceinline__ void stage(const void* x, DType dtype, int32_t first, int32_t step,
                                      int32_t count, const Find& find, const Keep& keep) {
  constexpr int kUnits = 16 / kEach;
#pragma unroll 1
  for (; first < count; first += step * kUnits) {
    float values[kUnits][kEach];
    int32_t to[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int32_t n = first + i * step;
      const Unit unit = n < count ? find(n) : Unit{0, -1};
      to[i] = unit.to;
      if (unit.to >= 0) load(x, unit.from, dtype, values[i]);
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (to[i] >= 0) keep(to[i], values[i]);
    }
  }
}

/// The part of a patch that lies in the image: rows [top, bottom) and columns [left, right), of
/// which the patch begins at (first_row, first_column).
struct Inside {
  int32_t first_row, first_column, top, left, bottom, right;

  __device__ Inside(const Params& p, const Corner& corner)
      : first_row(corner.row * p.rows.down + p.rows.origin),
        first_column(corner.column * p.columns.down + p.columns.origin),
        top(max(first_row, 0)),
        left(max(first_column, 0)),
        bottom(min(first_row + p.tile.patch_rows, p.rows.size)),
        right(min(first_column + p.tile.patch_columns, p.columns.size)) {}

  __device__ bool is_all(const Tile& t) const {
    return bottom - top == t.patch_rows && right - left == t.patch_columns;
  }
  /// The element of the block's first channel at (top, column).
  __device__ const void* begin(const Params& p, const Corner& corner, int32_t column) const {
    const int64_t at = corner.image * p.x_strides[0] +
                       int64_t(corner.group) * p.channels.divisor * p.x_strides[1] +
                       top * p.x_strides[2] + column * p.x_strides[3];
    return static_cast<const char*>(p.x) + at * size_of(p.dtype);
  }
};

/// Zeros, which stay where the image has no pixel.
__device__ __forceinline__ void clear_patch(const Tile& t, float* patch) {
  for (int32_t i = threadIdx.x; i < t.patch_floats / 4; i += kThreads) {
    reinterpret_cast<float4*>(patch)[i] = {0.f, 0.f, 0.f, 0.f};
  }
}

/// [channel][row][pitch] of planes. A thread has one column, or four, of every few rows.
template <int kEach>
__device__ __forceinline__ void stage_planes(const Params& p, const Corner& corner,
                                             const Inside& inside, float* patch) {
  const Tile& t = p.tile;
  const int32_t lanes = kEach == 4 ? t.four_lanes : t.lanes;
  const int32_t planes = min(t.groups.divisor, p.groups - corner.group) * p.channels.divisor;
  const int32_t begin = inside.left & -kEach;  // of fours, at a multiple of four
  const void* const x = inside.begin(p, corner, begin);
  const auto of_plane = static_cast<int32_t>(p.x_strides[1]);
  const auto of_row = static_cast<int32_t>(p.x_strides[2]);
  const auto of_column = static_cast<int32_t>(p.x_strides[3]);
  const int32_t above = inside.top - inside.first_row;
  // Lanes begin with another of their four each eight lanes, so that they meet no bank twice.
  const int32_t turn = threadIdx.x / 8 % 4;
#pragma unroll 1
  for (int32_t at = threadIdx.x % lanes * kEach; begin + at < inside.right; at += lanes * kEach) {
    const int32_t column = begin + at - inside.first_column;  // of the patch
    const auto find = [&](int32_t plane) {
      const int32_t row = t.inside_rows.take(&plane);
      const bool exists = inside.top + row < inside.bottom;
      const int32_t line = plane * t.patch_rows + above + row;
      return Unit{plane * of_plane + row * of_row + at * of_column, exists ? line * t.pitch : -1};
    };
    const auto keep = [&](int32_t line, const float (&v)[kEach]) {
      float* const to = patch + line + column;
      if constexpr (kEach == 1) {
        to[0] = v[0];
      } else {
        const bool one = (turn & 1) != 0, two = (turn & 2) != 0;
        const float a[4] = {one ? v[1] : v[0], one ? v[2] : v[1], one ? v[3] : v[2],
                            one ? v[0] : v[3]};
        const float b[4] = {two ? a[2] : a[0], two ? a[3] : a[1], two ? a[0] : a[2],
                            two ? a[1] : a[3]};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int32_t e = (k + turn) % 4;
          if (column + e >= 0 && column + e < t.patch_columns) to[e] = b[k];
        }
      }
    };
    stage<kEach>(x, p.dtype, threadIdx.x / lanes, kThreads / lanes, planes * t.inside_rows.divisor,
                 find, keep);
  }
}

/// [row][column][channel] of pixels, kPixelChannels each. A thread has one channel, or four, of
/// every few pixels.
template <int kEach>
__device__ __forceinline__ void stage_pixels(const Params& p, const Corner& corner,
                                             const Inside& inside, float* patch) {
  constexpr int32_t kLanes = kPixelChannels / kEach;
  const Tile& t = p.tile;
  const int32_t channels = min(t.groups.divisor, p.groups - corner.group) * p.channels.divisor;
  const int32_t channel = threadIdx.x % kLanes * kEach;
  if (channel >= channels) return;
  const void* const x = inside.begin(p, corner, inside.left);
  const int32_t from = channel * static_cast<int32_t>(p.x_strides[1]);
  const auto of_row = static_cast<int32_t>(p.x_strides[2]);
  const auto of_column = static_cast<int32_t>(p.x_strides[3]);
  const int32_t first =
      (inside.top - inside.first_row) * t.patch_columns + inside.left - inside.first_column;
  const auto find = [&](int32_t row) {
    const int32_t column = t.inside_columns.take(&row);
    const bool exists = inside.left + column < inside.right;
    const int32_t pixel = first + row * t.patch_columns + column;
    return Unit{from + row * of_row + column * of_column, exists ? pixel * kPixelChannels : -1};
  };
  const auto keep = [&](int32_t pixel, const float (&v)[kEach]) {
    float* const to = patch + pixel + channel;
    if constexpr (kEach == 1) {
      to[0] = v[0];
    } else {
      *reinterpret_cast<float4*>(to) = {v[0], v[1], v[2], v[3]};
    }
  };
  stage<kEach>(x, p.dtype, threadIdx.x / kLanes, kThreads / kLanes,
               (inside.bottom - inside.top) * t.inside_columns.divisor, find, keep);
}

/// [group][feature][channel][tap]; whether all are finite.
template <int kTaps>
__device__ __forceinline__ bool stage_weights(const Params& p, const Corner& corner,
                                              float* weights) {
  const Tile& t = p.tile;
  const Filters& f = p.filters;
  constexpr int32_t kFilter = kTaps * kTaps;
  bool finite = true;
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < t.weight_floats; i += kThreads) {
    const int32_t tap = i % kFilter;
    int32_t rest = i / kFilter;
    const int32_t channel = p.channels.take(&rest);
    const int32_t feature = corner.feature + t.features.take(&rest);
    const int32_t group = corner.group + rest;
    float weight = 0.f;
    if (group < p.groups && feature < p.features) {
      const int64_t at =
          group * f.group + feature * f.k + channel * f.c + tap / kTaps * f.r + tap % kTaps * f.s;
      weight = load_value(f.data, at, p.dtype);
    }
    weights[i] = weight;
    finite = finite && isfinite(weight);
  }
  return finite;
}

}  // namespace cutfuse::conv::direct
