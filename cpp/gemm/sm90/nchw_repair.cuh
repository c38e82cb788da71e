/// \file
/// Results of NCHW images as they are that are not finite. Finite sums must not end there, but do
/// where the copy engine rounds the largest fp32 values to infinity, at TF32, and where scaled sums
/// leave fp32's range.
#pragma once

#include <cutlass/cutlass.h>

#include "gemm/images.cuh"
#include "gemm/launcher.h"
#include "gemm/unscale.cuh"

namespace cutfuse::gemm::sm90 {

/// One result in fp32, by one warp: of the terms with a non-finite factor alone if there are any,
/// as in repair.cuh.
CUTLASS_DEVICE float sum_of_pixel(const Images& images, const EpilogueArguments& arguments,
                                  int32_t row, int32_t column, int lane) {
  const int64_t pixels = images.out_pixels();
  const auto* x = static_cast<const float*>(arguments.a.data) +
                  plane_pixel(images, row, images.channels).offset;
  const ConstMatrix& b = arguments.b;
  const auto* weight = static_cast<const float*>(b.data) + column * b.row_stride;
  float finite = 0.f, others = 0.f;
  bool has_others = false;
  for (int32_t c = lane; c < images.channels; c += 32) {
    const float factor = __ldg(x + c * pixels), other = __ldg(weight + c * b.col_stride);
    const bool is_other = !isfinite(factor) || !isfinite(other);
    has_others = has_others || is_other;
    (is_other ? others : finite) += factor * other;
  }
  float sum = __any_sync(0xffffffffu, has_others) ? others : finite;
  CUTLASS_PRAGMA_UNROLL
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  return sum;
}

/// Whether all of the warp's are.
template <int kSize>
CUTLASS_DEVICE bool are_finite(const float (&v)[kSize]) {
  float probe = 0.f;  // becomes NaN
  CUTLASS_PRAGMA_UNROLL
  for (const float value : v) probe = fmaf(value, 0.f, probe);
  return __all_sync(0xffffffffu, probe == 0.f);
}

/// Columns with non-finite weights, which are zeros in the planes, become NaN.
template <class Coordinates>
CUTLASS_DEVICE void mark_columns(float (&v)[Coordinates::kSize], const Coordinates& at) {
  for_each_pair<Coordinates>([&](int j) {
    const int2 words = at.read_slot(0, j);
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < Coordinates::kRows; ++r) {
      if (row_has_nonfinite(words.x)) v[(j * Coordinates::kRows + r) * 2] = NAN;
      if (row_has_nonfinite(words.y)) v[(j * Coordinates::kRows + r) * 2 + 1] = NAN;
    }
  });
}

/// Sums again what is not finite. kFolded: the steps that were folded ahead have been applied.
/// Rare, so it may be slow.
template <bool kFolded, class Coordinates>
CUTLASS_DEVICE void repair_pixels(float (&v)[Coordinates::kSize], const Coordinates& at,
                                  const EpilogueArguments& arguments, int lane) {
  CUTLASS_PRAGMA_NO_UNROLL
  for (int i = 0; i < Coordinates::kSize; ++i) {
    float value = 0.f;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Coordinates::kSize; ++j) value = j == i ? v[j] : value;
    const int32_t own_row = at.row0 + Coordinates::kRowStep * (i / 2 % 2);
    const int32_t own_column = at.column0 + i / 4 * 8 + i % 2;
    const bool wanted = !isfinite(value) && own_column < at.columns &&
                        plane_pixel(*at.images, own_row, at.columns).is_inside;
    for (uint32_t lanes = __ballot_sync(0xffffffffu, wanted); lanes != 0; lanes &= lanes - 1) {
      const int owner = __ffs(lanes) - 1;
      const int32_t row = __shfl_sync(0xffffffffu, own_row, owner);
      const int32_t column = __shfl_sync(0xffffffffu, own_column, owner);
      const float sum = sum_of_pixel(*at.images, arguments, row, column, lane);
      if (lane != owner) continue;
      value = sum;
      if constexpr (kFolded) {
        const float2 step = __ldg(arguments.folded + column);
        value = fmaf(sum, step.x, step.y);
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Coordinates::kSize; ++j) v[j] = j == i ? value : v[j];
  }
}

}  // namespace cutfuse::gemm::sm90
