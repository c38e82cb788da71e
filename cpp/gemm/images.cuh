/// \file
/// The epilogue's side of images: where pixels' results and operands lie, and repair.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/values.cuh"
#include "gemm/images.h"
#include "gemm/launcher.h"
#include "program/executor.cuh"

namespace cutfuse::gemm {

/// Of a fragment whose rows are pixels of images.
template <class Fragment>
struct ImageCoordinates : Fragment {
  const Images* images;
};

/// As executor::row_offset: full operands beside planes lie as those do.
template <class Fragment>
__device__ __forceinline__ int64_t row_offset(const ImageCoordinates<Fragment>& at, int r,
                                              const Operand& operand) {
  const int64_t row = at.row(r);
  if (!at.images->planes_out || operand.row_stride == 0) return row * operand.row_stride;
  return plane_pixel(*at.images, static_cast<int32_t>(row), at.columns).offset;
}

/// As in repair.cuh. The padding is no factor.
template <class Fragment>
__device__ __forceinline__ float nonfinite_terms(const ImageCoordinates<Fragment>& at,
                                                 const EpilogueArguments& arguments, int64_t row,
                                                 int64_t column, int lane) {
  const Images& images = *at.images;
  const int64_t (&x_strides)[4] = arguments.x_strides;
  const int64_t (&w_strides)[4] = arguments.weight_strides;
  const FirstTap first = first_tap(images, static_cast<int32_t>(row));
  float sum = 0.f;
  for (int32_t tap = 0; tap < images.taps(); ++tap) {
    const int32_t r = tap / images.kernel_w;
    const int32_t s = tap - r * images.kernel_w;
    const int32_t h = first.h + r * images.dilation_h;
    const int32_t w = first.w + s * images.dilation_w;
    if (h < 0 || h >= images.height || w < 0 || w >= images.width) continue;
    const int64_t x_at = first.image * x_strides[0] + h * x_strides[2] + w * x_strides[3];
    const int64_t w_at = column * w_strides[0] + r * w_strides[2] + s * w_strides[3];
    for (int32_t c = lane; c < images.channels; c += 32) {
      const float x = load_value(arguments.a.data, x_at + c * x_strides[1], arguments.a.dtype);
      const float weight = load_value(arguments.b.data, w_at + c * w_strides[1], arguments.b.dtype);
      if (!isfinite(x) || !isfinite(weight)) sum += x * weight;
    }
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  return sum;
}

/// Results to the planes of NCHW: of a channel eight neighbouring lanes hold eight pixels, a
/// sector.
template <class Fragment>
__device__ __forceinline__ void store_to_planes(const float (&v)[Fragment::kSize],
                                                const ImageCoordinates<Fragment>& at,
                                                const Matrix& out) {
  constexpr int kRows = Fragment::kRows;
  constexpr int kPairsAtOnce = 4;
  const int64_t pixels = at.images->out_pixels();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (!at.row_inside(r)) continue;
    const int64_t first =
        plane_pixel(*at.images, at.row0 + 8 * r, at.columns).offset + at.column0 * pixels;
    executor::for_each_chunk<true, Fragment::kColumnPairs / kPairsAtOnce>([&](int chunk) {
#pragma unroll
      for (int i = 0; i < 2 * kPairsAtOnce; ++i) {
        const int j = chunk * kPairsAtOnce + i / 2;
        if (at.column_inside(j, i % 2)) {
          store_value(out.data, first + (8 * j + i % 2) * pixels, v[(j * kRows + r) * 2 + i % 2],
                      out.dtype);
        }
      }
    });
  }
}

}  // namespace cutfuse::gemm
