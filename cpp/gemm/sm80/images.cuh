/// \file
/// A's tiles from images: a thread follows some pixels' filters from tap to tap.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "gemm/images.h"
#include "gemm/sm80/instructions.cuh"
#include "gemm/sm80/operands.h"

namespace cutfuse::gemm::sm80 {

/// Of matrices.
struct NoPixels {};

/// The rows that one thread copies, every kRowsAtOnce-th of a tile.
template <class Shape, int kRowsAtOnce>
class Pixels {
 public:
  /// From `row` on; those beyond the last pixel repeat it.
  __device__ __forceinline__ void start(const Operands& operands, int row) {
    const Images& images = operands.images;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const FirstTap first = first_tap(images, min(row + i * kRowsAtOnce, operands.m - 1));
      const int64_t line = int64_t(first.image) * images.height + first.h;
      from_[i] = (line * images.width + first.w) * operands.a_leading;
      h_[i] = first.h;
      w_[i] = first.w;
    }
  }

  /// Starts copying the next k-tile, zeros outside of the image and where it is not `inside` K.
  __device__ __forceinline__ void copy(const Operands& operands, int vector, uint32_t to,
                                       bool inside) {
    const Images& images = operands.images;
    const int channel = channel_ + vector * 8;
    const int down = r_ * images.dilation_h;
    const int right = s_ * images.dilation_w;
    const int64_t tap =
        (int64_t(down) * images.width + right) * operands.a_leading + int64_t(channel) * 2;
    inside = inside && channel < images.channels;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int h = h_[i] + down;
      const int w = w_[i] + right;
      const bool exists = inside && h >= 0 && h < images.height && w >= 0 && w < images.width;
      const char* from = exists ? operands.a + from_[i] + tap : operands.a;
#pragma unroll
      for (int plane = 0; plane < Shape::kPlanes; ++plane) {
        copy_async(to + plane * Shape::kPlaneBytesA + i * kRowsAtOnce * Shape::kRowBytes,
                   from + plane * operands.a_plane, exists);
      }
    }
    channel_ += Shape::kTileK;
    if (channel_ < images.tap_channels()) return;
    channel_ = 0;
    if (++s_ < images.kernel_w) return;
    s_ = 0;
    ++r_;
  }

 private:
  static constexpr int kRows = Shape::kTileM / kRowsAtOnce;
  static_assert(kTapAlignment % Shape::kTileK == 0);

  int64_t from_[kRows];  // bytes to where the filter begins
  int h_[kRows], w_[kRows];
  int channel_ = 0, r_ = 0, s_ = 0;
};

}  // namespace cutfuse::gemm::sm80
