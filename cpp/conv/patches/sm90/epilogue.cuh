/// \file
/// From a tile's sums to the planes of NCHW: undo the weights' scales, sum again what is not
/// finite, run the program, store.
#pragma once

#include <cutlass/cutlass.h>

#include "conv/patches/params.h"
#include "gemm/coordinates.cuh"
#include "gemm/sm90/nchw_repair.cuh"
#include "gemm/stage.cuh"
#include "gemm/unscale.cuh"
#include "program/executor.cuh"

namespace cutfuse::conv::patches::sm90 {

/// Columns are output channels, rows pixels of a block of one image.
template <int kN>
struct PatchCoordinates : gemm::FragmentCoordinates<2, kN / 8, kN, 14> {
  int32_t image;
  int32_t out_pixels;
  int32_t pixel[2];  // in its plane; where there is none, one that exists
  bool inside[2];

  /// Of the first channel's plane of the result.
  CUTLASS_DEVICE int64_t plane_offset(int r) const {
    return int64_t(image) * this->columns * out_pixels + pixel[r];
  }
};

/// As executor::row_offset: full operands lie as the result does.
template <int kN>
CUTLASS_DEVICE int64_t row_offset(const PatchCoordinates<kN>& at, int r, const Operand& operand) {
  return operand.row_stride == 0 ? 0 : at.plane_offset(r);
}

/// One result in fp32, by one warp. The padding is no factor.
CUTLASS_DEVICE float sum_of_pixel(const Geometry& g, const gemm::EpilogueArguments& arguments,
                                  int32_t image, int32_t pixel, int32_t column, int lane) {
  const int32_t p = pixel / g.out_width;
  const int32_t top = p * g.stride_h - g.pad_h;
  const int32_t left = (pixel - p * g.out_width) * g.stride_w - g.pad_w;
  const int64_t plane = int64_t(g.height) * g.width;
  const auto* x = static_cast<const float*>(arguments.a.data) + int64_t(image) * g.channels * plane;
  const int64_t (&w)[4] = arguments.weight_strides;
  const auto* weight = static_cast<const float*>(arguments.b.data) + column * w[0];
  gemm::sm90::SumAgain sum;
  for (int32_t term = lane; term < g.terms; term += 32) {
    const int32_t channel = term / g.taps();
    const int32_t tap = term - channel * g.taps();
    const int32_t r = tap / g.kernel_w, s = tap - r * g.kernel_w;
    const int32_t row = top + r * g.dilation_h, col = left + s * g.dilation_w;
    if (row < 0 || row >= g.height || col < 0 || col >= g.width) continue;
    sum.add(__ldg(x + channel * plane + int64_t(row) * g.width + col),
            __ldg(weight + channel * w[1] + r * w[2] + s * w[3]));
  }
  return sum.of_warp();
}

/// Sums again what is not finite.
template <int kN>
CUTLASS_DEVICE void repair(float (&v)[kN / 2], const PatchCoordinates<kN>& at, const Geometry& g,
                           const gemm::EpilogueArguments& arguments, int lane) {
  const auto place = [&](int i) -> gemm::sm90::Place {
    const bool first = i / 2 % 2 == 0;
    const int32_t column = at.column0 + i / 4 * 8 + i % 2;
    return {first ? at.pixel[0] : at.pixel[1], column,
            column < at.columns && (first ? at.inside[0] : at.inside[1])};
  };
  gemm::sm90::sum_again(v, lane, place, [&](int32_t pixel, int32_t column) {
    return sum_of_pixel(g, arguments, at.image, pixel, column, lane);
  });
}

/// Neighbours exchange half their results, so that 16 pixels of a channel leave together.
template <int kN>
CUTLASS_DEVICE void store(const float (&v)[kN / 2], const PatchCoordinates<kN>& at, float* out) {
  const int lane = threadIdx.x % 32;
  const bool odd = lane % 2 != 0;
  const int64_t pixels = at.out_pixels;
  const bool inside = odd ? at.inside[1] : at.inside[0];
  const int column0 = lane % 4 / 2 * 4;
  float* target = out + (odd ? at.plane_offset(1) : at.plane_offset(0)) + column0 * pixels;
  CUTLASS_PRAGMA_UNROLL
  for (int j = 0; j < kN / 8; ++j) {
    float turned[4];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float first = v[4 * j + i], second = v[4 * j + 2 + i];
      const float other = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
      turned[i] = odd ? other : first;
      turned[2 + i] = odd ? second : other;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (inside && column0 + 8 * j + i < at.columns) *target = turned[i];
      target += i < 3 ? pixels : 5 * pixels;
    }
  }
}

/// plain: whether x and the weights are finite, so that sums are, and the columns' words plain.
template <int kN>
CUTLASS_DEVICE void finish(const Params& p, bool plain, int exponent, float (&v)[kN / 2],
                           const PatchCoordinates<kN>& at) {
  using Coordinates = PatchCoordinates<kN>;
  const gemm::EpilogueArguments& arguments = p.epilogue;
  const int words[2] = {2 * exponent, 2 * exponent};  // as split() makes them
  int first = 0;
  if (plain && gemm::is_plain(words[0])) {
    gemm::apply_folded(v, words, at, gemm::kScaleSlot<Coordinates>);
    first = arguments.affine_steps;
  } else {
    if (gemm::unscale(v, words, at)) gemm::sm90::mark_columns(v, at);
    repair(v, at, p.g, arguments, int(threadIdx.x) % 32);
  }
  execute(arguments.program, v, at, first);
  store<kN>(v, at, static_cast<float*>(arguments.out.data));
}

}  // namespace cutfuse::conv::patches::sm90
