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

/// A sum of products by one warp: of those with a non-finite factor alone if there are any, as in
/// repair.cuh.
class SumAgain {
 public:
  CUTLASS_DEVICE void add(float factor, float other) {
    const bool is_other = !isfinite(factor) || !isfinite(other);
    has_others_ = has_others_ || is_other;
    (is_other ? others_ : finite_) += factor * other;
  }
  CUTLASS_DEVICE float of_warp() const {
    float sum = __any_sync(0xffffffffu, has_others_) ? others_ : finite_;
    CUTLASS_PRAGMA_UNROLL
    for (int offset = 16; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
    return sum;
  }

 private:
  float finite_ = 0.f, others_ = 0.f;
  bool has_others_ = false;
};

/// One result in fp32, by one warp.
CUTLASS_DEVICE float sum_of_pixel(const Images& images, const EpilogueArguments& arguments,
                                  int32_t row, int32_t column, int lane) {
  const int64_t pixels = images.out_pixels();
  const auto* x = static_cast<const float*>(arguments.a.data) +
                  plane_pixel(images, row, images.channels).offset;
  const ConstMatrix& b = arguments.b;
  const auto* weight = static_cast<const float*>(b.data) + column * b.row_stride;
  SumAgain sum;
  for (int32_t c = lane; c < images.channels; c += 32) {
    sum.add(__ldg(x + c * pixels), __ldg(weight + c * b.col_stride));
  }
  return sum.of_warp();
}

struct Place {
  int32_t row, column;
  bool wanted;
};

/// Replaces what is not finite of a warp's values, where place(i) of value i is wanted, by
/// sum(row, column), which the whole warp calls. Rare, so it may be slow.
template <int kSize, class PlaceOf, class Sum>
CUTLASS_DEVICE void sum_again(float (&v)[kSize], int lane, const PlaceOf& place, const Sum& sum) {
  CUTLASS_PRAGMA_NO_UNROLL
  for (int i = 0; i < kSize; ++i) {
    float value = 0.f;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kSize; ++j) value = j == i ? v[j] : value;
    const auto own = place(i);
    const bool wanted = !isfinite(value) && own.wanted;
    for (uint32_t lanes = __ballot_sync(0xffffffffu, wanted); lanes != 0; lanes &= lanes - 1) {
      const int owner = __ffs(lanes) - 1;
      const int32_t row = __shfl_sync(0xffffffffu, own.row, owner);
      const int32_t column = __shfl_sync(0xffffffffu, own.column, owner);
      const float again = sum(row, column);
      if (lane == owner) value = again;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kSize; ++j) v[j] = j == i ? value : v[j];
  }
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
template <bool kFolded, class Coordinates>
CUTLASS_DEVICE void repair_pixels(float (&v)[Coordinates::kSize], const Coordinates& at,
                                  const EpilogueArguments& arguments, int lane) {
  const auto place = [&](int i) -> Place {
    const int32_t row = at.row0 + Coordinates::kRowStep * (i / 2 % 2);
    const int32_t column = at.column0 + i / 4 * 8 + i % 2;
    return {row, column, column < at.columns && plane_pixel(*at.images, row, at.columns).is_inside};
  };
  sum_again(v, lane, place, [&](int32_t row, int32_t column) {
    const float sum = sum_of_pixel(*at.images, arguments, row, column, lane);
    if constexpr (!kFolded) return sum;
    const float2 step = __ldg(arguments.folded + column);
    return fmaf(sum, step.x, step.y);
  });
}

}  // namespace cutfuse::gemm::sm90
