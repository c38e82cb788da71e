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
  for (int i = 0; i < kSize; ++i) cute::warpgroup_fence_operand(values[i]);
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

/// A chunk of 32 terms in one or two planes.
template <int kPlanes>
struct Planes {
  uint32_t of[kPlanes][kSteps][4];  // high halves, low ones

  /// Raises `largest` to the largest magnitudes of the first plane, or to what is not a number.
  CUTLASS_DEVICE void split(const float (&x)[kSteps][8], float scale, __half2& largest) {
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {  // pixel i % 2, eight terms i / 2
        const int r = i % 2, of_eight = i / 2;
        const float a = x[step][4 * of_eight + r] * scale;
        const float b = x[step][4 * of_eight + 2 + r] * scale;
        const __half2 pair = __floats2half2_rn(a, b);
        of[0][step][i] = *reinterpret_cast<const uint32_t*>(&pair);
        largest = __hmax2_nan(largest, __habs2(pair));
        if constexpr (kPlanes == 2) {
          const float2 rounded = __half22float2(pair);
          const __half2 rest = __floats2half2_rn(a - rounded.x, b - rounded.y);
          of[1][step][i] = *reinterpret_cast<const uint32_t*>(&rest);
        }
      }
    }
  }
};

template <int kPlanes>
CUTLASS_DEVICE void fence(Planes<kPlanes>& a) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kPlanes; ++i) fence(a.of[i]);
}

/// Sums in units of x * scale and of the weights' scaled rows. What is not finite makes its pixel's
/// results so.
template <int kN, int kPlanes>
class Multiplier {
 public:
  CUTLASS_DEVICE Multiplier(const Pixels& pixels, float scale, uint32_t weights, int terms)
      : pixels_(pixels), scale_(scale), weights_(weights), chunks_((terms + kChunk - 1) / kChunk) {}

  /// Two planes' sums are promoted from the tensor cores' accumulator every kTerms terms. One set
  /// of registers is multiplied while the other is filled.
  template <int kTerms>
  CUTLASS_DEVICE void run(float promotion, float (&sum)[kN / 2]) {
    constexpr bool kTwo = kTerms == 2 * kChunk;
    static_assert(kTwo || (kPlanes == 2 && kChunk % kTerms == 0));
    clear(sum);
    clear(partial_);
    Planes<kPlanes> even, odd;
    pixels_.look_up(0, far_);
    fill(0, even);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int chunk = 0; chunk < chunks_; chunk += 2) {
      if constexpr (kTwo) {
        two_chunks(chunk, even, odd, promotion, sum);
      } else {
        one_chunk<kTerms / 16>(chunk, even, odd, promotion, sum);
        if (chunk + 1 == chunks_) break;
        one_chunk<kTerms / 16>(chunk + 1, odd, even, promotion, sum);
      }
    }
    if constexpr (kPlanes == 1) copy(partial_, sum);
  }

  /// Bits of this thread's largest magnitude of x * scale, as fp16.
  CUTLASS_DEVICE uint32_t largest() const {
    const auto bits = *reinterpret_cast<const uint32_t*>(&largest_);
    return max(bits & 0xffff, bits >> 16);
  }

 private:
  using Product = Instruction<kN>;
  static constexpr uint32_t kPlaneBytes = kN * kRowBytes;

  Pixels pixels_;
  float scale_;
  uint32_t weights_;
  int chunks_;
  __half2 largest_ = __float2half2_rn(0.f);
  int2 far_[kSteps];  // of the chunk that is filled next
  float partial_[kN / 2];

  CUTLASS_DEVICE uint32_t weights_of(int chunk) const {
    return operand_word(weights_ + chunk / 2 * (kPlanes * kPlaneBytes) + chunk % 2 * (2 * kChunk));
  }
  CUTLASS_DEVICE static void clear(float (&sum)[kN / 2]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kN / 2; ++i) sum[i] = 0.f;
  }
  CUTLASS_DEVICE static void copy(const float (&from)[kN / 2], float (&to)[kN / 2]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kN / 2; ++i) to[i] = from[i];
  }

  CUTLASS_DEVICE void fill(int chunk, Planes<kPlanes>& a) {
    float x[kSteps][8];
    pixels_.load(far_, x);
    pixels_.look_up(min(chunk + 1, chunks_ - 1), far_);
    a.split(x, scale_, largest_);
  }

  /// Begins to multiply kOnce steps from `first` on, which are added to partial_ unless `anew`.
  template <int kOnce>
  CUTLASS_DEVICE void begin(int chunk, Planes<kPlanes>& a, int first, bool anew) {
    fence(a);
    cute::warpgroup_arrive();
    multiply<kOnce>(a, first, weights_of(chunk), anew);
    cute::warpgroup_commit_batch();
  }

  CUTLASS_DEVICE void fill_next(int chunk, Planes<kPlanes>& next) {
    fill(chunk + 1, next);
    fence(next);  // here, and not after the wait
  }

  template <int kOnce>
  CUTLASS_DEVICE void one_chunk(int chunk, Planes<kPlanes>& a, Planes<kPlanes>& next,
                                float promotion, float (&sum)[kN / 2]) {
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < kSteps; first += kOnce) {
      fence(partial_);
      begin<kOnce>(chunk, a, first, true);
      if (first == 0) fill_next(chunk, next);
      cute::warpgroup_wait<0>();
      fence(partial_);
      fence(a);  // until here they were read
      promote(promotion, sum);
    }
  }

  CUTLASS_DEVICE void two_chunks(int chunk, Planes<kPlanes>& even, Planes<kPlanes>& odd,
                                 float promotion, float (&sum)[kN / 2]) {
    fence(partial_);
    begin<kSteps>(chunk, even, 0, kPlanes == 2);
    fill_next(chunk, odd);
    if (chunk + 1 < chunks_) {
      begin<kSteps>(chunk + 1, odd, 0, false);
      cute::warpgroup_wait<1>();
      fence(even);
      fill_next(chunk + 1, even);
    }
    cute::warpgroup_wait<0>();
    fence(partial_);
    fence(odd);
    // Truncation takes 1.5 to 1.9 times 2^-23 off sums of one sign, as of the GEMM's k-tiles.
    if constexpr (kPlanes == 2) promote(chunk % 4 == 0 ? promotion : 2.f * promotion - 1.f, sum);
  }

  /// Small products first: the accumulator truncates at the size of what it already holds.
  template <int kOnce>
  CUTLASS_DEVICE void multiply(const Planes<kPlanes>& a, int first, uint32_t weights, bool anew) {
    if constexpr (kPlanes == 2) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = first; i < first + kOnce; ++i) {
        Product::run(partial_, a.of[1][i], weights + 2 * i, !anew || i > first);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = first; i < first + kOnce; ++i) {
        Product::run(partial_, a.of[0][i], weights + (kPlaneBytes >> 4) + 2 * i, true);
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = first; i < first + kOnce; ++i) {
      Product::run(partial_, a.of[0][i], weights + 2 * i, true);
    }
  }

  CUTLASS_DEVICE void promote(float factor, float (&sum)[kN / 2]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kN / 2; ++i) sum[i] = __fmaf_rn(partial_[i], factor, sum[i]);
  }
};

}  // namespace cutfuse::conv::patches::sm90
