/// \file
/// Filters whose size and stride the compiler knows: a block brings a patch of x to shared memory
/// once; a thread keeps a filter and a few rows of four results in registers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "conv/direct/gather.cuh"
#include "conv/direct/stage.cuh"
#include "core/launch.h"
#include "core/status.h"
#include "device/copies.cuh"

namespace cutfuse::conv::direct {

/// A thread's pixels: rows of kColumns, from (row, column) on.
struct Window {
  const Params& p;
  int32_t row, column;

  __device__ __forceinline__ bool inside(int i) const {
    return row + i / kColumns < p.rows.out_size && column + i % kColumns < p.columns.out_size;
  }
  __device__ __forceinline__ int64_t pixel(int i) const {
    return int64_t(row + i / kColumns) * p.columns.out_size + column + i % kColumns;
  }
  __device__ __forceinline__ int64_t at(int i) const {
    return int64_t(min(row + i / kColumns, p.rows.out_size - 1)) * p.columns.out_size +
           min(column + i % kColumns, p.columns.out_size - 1);
  }
};

/// Adds a channel's products to sums of their own first, and so those of a row of the filter, so
/// that long sums round less: of 49 positive values in one go 3.8e-7 of their sum, where PyTorch's
/// were 3.5e-7, of 9 2.7e-7 and 2.0e-7. `from` is the first value of the patch that the first
/// result meets, `pitch` floats from row to row.
template <int kTaps, int kStride, bool kPixels>
__device__ __forceinline__ void add_channel(const float* from, int32_t pitch, const float* weights,
                                            float (&v)[rows_at(kStride) * kColumns]) {
  constexpr int kRows = rows_at(kStride);
  constexpr int kMet = (kColumns - 1) * kStride + kTaps;
  constexpr int kFours = (kMet + 3) / 4;
  float weight[kTaps * kTaps];
#pragma unroll
  for (int i = 0; i < kTaps * kTaps; ++i) weight[i] = weights[i];
  float sums[kRows * kColumns];
#pragma unroll
  for (int i = 0; i < kRows * kColumns; ++i) sums[i] = 0.f;
#pragma unroll
  for (int row = 0; row < (kRows - 1) * kStride + kTaps; ++row) {
    float met[kFours * 4];
    if constexpr (kPixels) {
#pragma unroll
      for (int i = 0; i < kMet; ++i) met[i] = from[row * pitch + i * kPixelChannels];
    } else {
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
        const float4 four = *reinterpret_cast<const float4*>(from + row * pitch + 4 * i);
        met[4 * i] = four.x;
        met[4 * i + 1] = four.y;
        met[4 * i + 2] = four.z;
        met[4 * i + 3] = four.w;
      }
    }
#pragma unroll
    for (int result = 0; result < kRows; ++result) {
      const int r = row - result * kStride;
      if (r < 0 || r >= kTaps) continue;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        float& sum = sums[result * kColumns + i];
        float part = 0.f;
#pragma unroll
        for (int s = 0; s < kTaps; ++s) {
          part = fmaf(met[i * kStride + s], weight[r * kTaps + s], part);
        }
        sum += part;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows * kColumns; ++i) v[i] += sums[i];
}

/// A thread's piece of a block: a channel, and a window of it.
struct Item {
  int32_t channel;         // of the block's
  int32_t group, feature;  // of the block's
  int32_t row, column;     // of the block's results
};

template <int kStride, bool kPixels>
__device__ __forceinline__ Item item_of(const Tile& t, int32_t number) {
  Item item;
  if constexpr (kPixels) {
    item.channel = t.all_features.take(&number);
    item.column = t.column_groups.take(&number) * kColumns;
    item.row = number * rows_at(kStride);
  } else {
    item.column = t.column_groups.take(&number) * kColumns;
    item.row = t.row_groups.take(&number) * rows_at(kStride);
    item.channel = number;
  }
  item.group = t.features.divide(item.channel);
  item.feature = item.channel - item.group * t.features.divisor;
  return item;
}

template <bool kPixels>
__device__ __forceinline__ Corner corner_of(const Tile& t, int32_t stride, int32_t block) {
  const int32_t rows = t.row_groups.divisor * rows_at(stride);
  const int32_t columns = t.column_groups.divisor * kColumns;
  Corner corner;
  // Blocks that follow each other write what lies side by side.
  if constexpr (kPixels) {
    corner.feature = t.feature_tiles.take(&block) * t.features.divisor;
    corner.group = t.group_tiles.take(&block) * t.groups.divisor;
  }
  corner.column = t.column_tiles.take(&block) * columns;
  corner.row = t.row_tiles.take(&block) * rows;
  if constexpr (!kPixels) {
    corner.feature = t.feature_tiles.take(&block) * t.features.divisor;
    corner.group = t.group_tiles.take(&block) * t.groups.divisor;
  }
  corner.image = block;
  return corner;
}

/// The sums of an item's results.
template <int kTaps, int kStride, bool kPixels>
__device__ __forceinline__ void sum(const Params& p, const Item& item, const float* patch,
                                    const float* weights, float (&v)[rows_at(kStride) * kColumns]) {
  const Tile& t = p.tile;
  const int32_t channels = p.channels.divisor;
  const int32_t row = item.row * kStride, column = item.column * kStride;
  const int32_t pitch = kPixels ? t.patch_columns * kPixelChannels : t.pitch;
  const int32_t plane = kPixels ? 1 : t.patch_rows * pitch;
  const float* from =
      patch + item.group * channels * plane + row * pitch + column * (kPixels ? kPixelChannels : 1);
  const float* filter = weights + item.channel * channels * (kTaps * kTaps);
#pragma unroll
  for (float& value : v) value = 0.f;
#pragma unroll 1
  for (int32_t c = 0; c < channels; ++c) {
    add_channel<kTaps, kStride, kPixels>(from + c * plane, pitch, filter + c * kTaps * kTaps, v);
  }
}

/// The same one product after the other: where a weight is not finite, which would make NaN of the
/// zeros that pad the patch, and where one row's infinity met another's that overflowed.
template <int kStride>
__device__ __forceinline__ void sum_inside(const Channel& channel, const Window& window,
                                           float (&v)[rows_at(kStride) * kColumns]) {
#pragma unroll 1
  for (int turn = 0; turn < rows_at(kStride); ++turn) {
    int32_t h[kColumns], w[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      h[i] = window.row + turn;
      w[i] = window.column + i;
    }
    float sums[kColumns];
    gather(window.p, channel, h, w, sums);
    // No index of a register is known at run time.
#pragma unroll
    for (int i = 0; i < rows_at(kStride) * kColumns; ++i) {
      if (i / kColumns == turn) v[i] = sums[i % kColumns];
    }
  }
}

template <int kRows>
__device__ __forceinline__ void store_four(const Channel& channel, const Window& window,
                                           const float (&v)[kRows * kColumns]) {
  const Params& p = window.p;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (!window.inside(i * kColumns)) break;
    const int64_t at = place_of(p, channel, window.pixel(i * kColumns));
    const float* four = v + i * kColumns;
    if (p.dtype == DType::kFloat32) {
      *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = {four[0], four[1], four[2],
                                                                     four[3]};
    } else {
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + at) = {
          pack_pair(four[0], four[1], p.dtype), pack_pair(four[2], four[3], p.dtype)};
    }
  }
}

template <int kRows>
__device__ __forceinline__ void store_pixels(const Channel& channel, const Window& window,
                                             const float (&v)[kRows * kColumns]) {
  const Params& p = window.p;
  const int64_t first = place_of(p, channel, window.pixel(0));
  const int64_t features = p.all_features();
#pragma unroll
  for (int i = 0; i < kRows * kColumns; ++i) {
    const int64_t at =
        first + (int64_t(i / kColumns) * p.columns.out_size + i % kColumns) * features;
    if (window.inside(i)) store_value(p.out, at, v[i], p.dtype);
  }
}

/// Results from shared memory [channel][row][column], so that lanes write what lies side by side. A
/// thread has one column of every few rows.
__device__ __forceinline__ void store_lines(const Params& p, const Corner& corner,
                                            const float* results) {
  const Tile& t = p.tile;
  const int32_t columns = min(t.columns, p.columns.out_size - corner.column);
  const int32_t lines = t.all_features.divisor * t.rows.divisor;
  const int64_t pixels = p.pixels();
#pragma unroll 1
  for (int32_t column = threadIdx.x % t.result_lanes; column < columns; column += t.result_lanes) {
#pragma unroll 4
    for (int32_t line = threadIdx.x / t.result_lanes; line < lines;
         line += kThreads / t.result_lanes) {
      int32_t rest = line;
      const int32_t row = corner.row + t.rows.take(&rest);
      const int32_t feature = corner.feature + t.features.take(&rest);
      const Channel channel{corner.image, corner.group + rest, feature};
      if (row < p.rows.out_size && feature < p.features && channel.group < p.groups) {
        const int64_t pixel = int64_t(row) * p.columns.out_size + corner.column + column;
        store_value(p.out, channel.plane(p) * pixels + pixel, results[line * t.columns + column],
                    p.dtype);
      }
    }
  }
}

/// Five blocks fit a multiprocessor with the 96 registers that the interpreter of 16 values needs;
/// with six it would spill, and with five the filter of 49 weights (nvcc 13.0).
constexpr int blocks_at(int taps) { return taps < 7 ? 5 : 4; }

template <int kTaps, int kStride, bool kPixels>
__global__ void __launch_bounds__(kThreads, blocks_at(kTaps))
    window_kernel(const __grid_constant__ Params p) {
  wait_for_previous_kernels();
  constexpr int kRows = rows_at(kStride);
  constexpr int kSize = kRows * kColumns;
  const Tile& t = p.tile;
  auto* const patch = reinterpret_cast<float*>(dynamic_shared());
  float* const weights = patch + t.patch_floats;
  float* const results = weights + t.weight_floats;
  const Corner corner = corner_of<kPixels>(t, kStride, static_cast<int32_t>(blockIdx.x));
  const bool finite = stage_weights<kTaps>(p, corner, weights);
  const Inside inside(p, corner);
  if (!inside.is_all(t)) {
    clear_patch(t, patch);
    __syncthreads();
  }
  if constexpr (kPixels) {
    p.four_at_once ? stage_pixels<4>(p, corner, inside, patch)
                   : stage_pixels<1>(p, corner, inside, patch);
  } else {
    p.four_at_once ? stage_planes<4>(p, corner, inside, patch)
                   : stage_planes<1>(p, corner, inside, patch);
  }
  const bool plain = __syncthreads_and(finite) != 0;
#pragma unroll 1
  for (int32_t number = threadIdx.x; number < t.items; number += kThreads) {
    const Item item = item_of<kStride, kPixels>(t, number);
    const Channel channel{corner.image, corner.group + item.group, corner.feature + item.feature};
    const Window window{p, corner.row + item.row, corner.column + item.column};
    if (channel.group >= p.groups || channel.feature >= p.features || !window.inside(0)) continue;
    float v[kSize];
    bool again = !plain;
    if (plain) {
      sum<kTaps, kStride, kPixels>(p, item, patch, weights, v);
#pragma unroll
      for (const float value : v) again = again || isnan(value);
    }
    if (again) sum_inside<kStride>(channel, window, v);
    execute(p.program, v, Coordinates<kSize, Window>{p, channel, window});
    if constexpr (kPixels) {
      store_pixels<kRows>(channel, window, v);
    } else if (p.stores_four) {
      store_four<kRows>(channel, window, v);
    } else {
      const int32_t line = item.channel * t.rows.divisor + item.row;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        *reinterpret_cast<float4*>(results + (line + i) * t.columns + item.column) = {
            v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]};
      }
    }
  }
  if constexpr (!kPixels) {
    if (p.stores_four) return;
    __syncthreads();
    store_lines(p, corner, results);
  }
}

template <int kTaps, bool kPixels>
Status run_window(const Params& p, void* stream) noexcept {
  const auto kernel =
      p.rows.down == 1 ? &window_kernel<kTaps, 1, kPixels> : &window_kernel<kTaps, 2, kPixels>;
  const bool keeps = !kPixels && !p.stores_four;
  const int32_t floats =
      p.tile.patch_floats + p.tile.weight_floats + (keeps ? p.tile.result_floats : 0);
  return launch(kernel, dim3(static_cast<unsigned>(p.blocks)), dim3(kThreads),
                static_cast<size_t>(floats) * sizeof(float), stream, p);
}

template <bool kPixels>
Status run_windows(const Params& p, void* stream) noexcept {
  switch (p.rows.taps) {
    case 3:
      return run_window<3, kPixels>(p, stream);
    case 5:
      return run_window<5, kPixels>(p, stream);
    default:
      return run_window<7, kPixels>(p, stream);
  }
}

}  // namespace cutfuse::conv::direct
