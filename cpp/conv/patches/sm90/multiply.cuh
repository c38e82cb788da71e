/// \file
/// A warpgroup's 64 pixels times all output channels, the pixels in registers.
#pragma once

#include <cuda_fp16.h>
#include <cutlass/cutlass.h>
#include <cutlass/numeric_types.h>
#include <cute/arch/mma_sm90.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/mma_sm90_gmma_ext.hpp>
#include <cute/arch/util.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>

#include "conv/patches/params.h"
#include "device/copies.cuh"

namespace cutfuse::conv::patches::sm90 {

/// Low word of a descriptor of rows of 128 bytes, swizzled by those; the high one is kRows.
CUTLASS_DEVICE uint32_t operand_word(uint32_t address) { return (address >> 4) | 1u << 16; }
inline constexpr uint32_t kRows = 1u << 30 | 8 * kRowBytes >> 4;

/// d = a * b (+ d): 64 pixels x kN channels x 16 terms.
template <int kN>
struct Instruction {
  using Op =
      decltype(cute::SM90::GMMA::rs_op_selector<cutlass::half_t, cutlass::half_t, float,
                                                cute::Shape<cute::_64, cute::Int<kN>, cute::_16>,
                                                cute::SM90::GMMA::Major::K,
                                                cute::SM90::GMMA::Major::K>());

  CUTLASS_DEVICE static void run(float (&d)[kN / 2], const uint32_t (&a)[4], uint32_t b, bool add) {
    const auto scale = add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero;
    const uint64_t descriptor = uint64_t(kRows) << 32 | b;
    cute::detail::explode(Op::fma, a, cute::make_int_sequence<4>{}, &descriptor,
                          cute::int_sequence<0>{}, d, cute::make_int_sequence<kN / 2>{}, &scale,
                          cute::int_sequence<0>{});
  }
};

template <int kSize>
CUTLASS_DEVICE void fence(float (&values)[kSize]) {
  CUTLASS_PRAGMA_UNROLL
  for (float& value : values) cute::warpgroup_fence_operand(value);
}
template <int kSize>
CUTLASS_DEVICE void fence(uint32_t (&words)[kSize][4]) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 4 * kSize; ++i) cute::warpgroup_fence_operand(words[i / 4][i % 4]);
}

inline constexpr int kChunk = 32;  // terms that are multiplied together
inline constexpr int kSteps = kChunk / 16;

/// The values of x of a thread's two pixels, eight rows of the tile apart. Of 16 terms a thread has
/// t, t + 4, t + 8 and t + 12, t the lane within four; table: how far those of each pixel are.
struct Pixels {
  uint32_t first;   // address of the value where the first pixel's filter begins
  uint32_t second;  // how far from there the second's does
  uint32_t table;   // of this lane

  CUTLASS_DEVICE void look_up(int chunk, int2 (&far)[kSteps]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      far[step] = load_shared(table + (chunk * kSteps + step) * 32);
    }
  }

  /// x[step][i] of pixel i % 2 and term i / 2 of the four.
  CUTLASS_DEVICE void load(const int2 (&far)[kSteps], float (&x)[kSteps][8]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8; ++i) {
        const auto pair = static_cast<uint32_t>(i / 4 == 0 ? far[step].x : far[step].y);
        const uint32_t address = first + (i / 2 % 2 == 0 ? pair & 0xffff : pair >> 16);
        x[step][i] = __uint_as_float(load_shared_word(i % 2 == 0 ? address : address + second));
      }
    }
  }
};

/// x * scale in two fp16 planes.
CUTLASS_DEVICE void split(const float (&x)[kSteps][8], float scale, uint32_t (&high)[kSteps][4],
                          uint32_t (&low)[kSteps][4]) {
  CUTLASS_PRAGMA_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {  // pixel i % 2, eight terms i / 2
      const int r = i % 2, of_eight = i / 2;
      const float a = x[step][4 * of_eight + r] * scale;
      const float b = x[step][4 * of_eight + 2 + r] * scale;
      const __half2 pair = __floats2half2_rn(a, b);
      const float2 rounded = __half22float2(pair);
      const __half2 rest = __floats2half2_rn(a - rounded.x, b - rounded.y);
      high[step][i] = *reinterpret_cast<const uint32_t*>(&pair);
      low[step][i] = *reinterpret_cast<const uint32_t*>(&rest);
    }
  }
}

/// A chunk of 32 terms in two planes.
struct Planes {
  uint32_t high[kSteps][4], low[kSteps][4];
};

/// Sums in units of x * scale and of the weights' scaled rows, promoted from the tensor cores'
/// accumulator. What is not finite makes its pixel's results so.
template <int kN>
class Multiplier {
 public:
  CUTLASS_DEVICE Multiplier(const Pixels& pixels, float scale, uint32_t weights, int terms)
      : pixels_(pixels), scale_(scale), weights_(weights), chunks_((terms + kChunk - 1) / kChunk) {}

  /// One set of registers is multiplied while the other is filled. Promoted by chunks.
  CUTLASS_DEVICE void run(float promotion, float (&sum)[kN / 2]) {
    clear(sum);
    int2 far[kSteps];  // of the chunk that is filled next
    pixels_.look_up(0, far);
    const auto fill = [&](int chunk, Planes& a) {
      float x[kSteps][8];
      pixels_.load(far, x);
      pixels_.look_up(min(chunk + 1, chunks_ - 1), far);
      split(x, scale_, a.high, a.low);
    };
    const auto step = [&](int chunk, Planes& a, Planes& next) {
      const uint32_t of_high = weights_of(chunk);
      const uint32_t of_low = of_high + (kPlaneBytes >> 4);
      begin(a);
      // Small products first: the accumulator truncates at the size of what it already holds.
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i) Product::run(partial_, a.low[i], of_high + 2 * i, i > 0);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i) Product::run(partial_, a.high[i], of_low + 2 * i, true);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i) Product::run(partial_, a.high[i], of_high + 2 * i, true);
      cute::warpgroup_commit_batch();
      fill(chunk + 1, next);
      fence(next.high);  // here, and not after the wait
      fence(next.low);
      end(a);
      promote(promotion, sum);
    };
    Planes even, odd;
    fill(0, even);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int chunk = 0; chunk < chunks_; chunk += 2) {
      step(chunk, even, odd);
      if (chunk + 1 == chunks_) break;
      step(chunk + 1, odd, even);
    }
  }

  /// Of sums so short that single truncations show: the fourth product is added, and each
  /// instruction of the large one promoted.
  CUTLASS_DEVICE void run_short(float promotion, float (&sum)[kN / 2]) {
    clear(sum);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      const uint32_t of_high = weights_of(chunk);
      const uint32_t of_low = of_high + (kPlaneBytes >> 4);
      int2 far[kSteps];
      float x[kSteps][8];
      Planes a;
      pixels_.look_up(chunk, far);
      pixels_.load(far, x);
      split(x, scale_, a.high, a.low);
      begin(a);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i) Product::run(partial_, a.low[i], of_low + 2 * i, i > 0);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i) Product::run(partial_, a.low[i], of_high + 2 * i, true);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i) Product::run(partial_, a.high[i], of_low + 2 * i, true);
      cute::warpgroup_commit_batch();
      end(a);
      promote(1.f, sum);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i) {
        begin(a);
        Product::run(partial_, a.high[i], of_high + 2 * i, false);
        cute::warpgroup_commit_batch();
        end(a);
        promote(promotion, sum);
      }
    }
  }

 private:
  using Product = Instruction<kN>;
  static constexpr int kPlaneBytes = kN * kRowBytes;

  Pixels pixels_;
  float scale_;
  uint32_t weights_;
  int chunks_;
  float partial_[kN / 2];

  CUTLASS_DEVICE uint32_t weights_of(int chunk) const {
    return operand_word(weights_ + chunk / 2 * (2 * kPlaneBytes) + chunk % 2 * (2 * kChunk));
  }
  CUTLASS_DEVICE static void clear(float (&sum)[kN / 2]) {
    CUTLASS_PRAGMA_UNROLL
    for (float& value : sum) value = 0.f;
  }
  CUTLASS_DEVICE void begin(Planes& a) {
    fence(partial_);
    fence(a.high);
    fence(a.low);
    cute::warpgroup_arrive();
  }
  CUTLASS_DEVICE void end(Planes& a) {
    cute::warpgroup_wait<0>();
    fence(partial_);
    fence(a.high);  // until here they were read
    fence(a.low);
  }
  CUTLASS_DEVICE void promote(float factor, float (&sum)[kN / 2]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kN / 2; ++i) sum[i] = __fmaf_rn(partial_[i], factor, sum[i]);
  }
};

}  // namespace cutfuse::conv::patches::sm90
