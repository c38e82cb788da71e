/// \file
/// Pieces of fp32 -> scaled fp16 planes that kernels share.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace cutfuse::planes {

inline constexpr int kGroup = 8;  // elements that one thread converts: 16 bytes of each plane

/// Largest finite magnitude, as the bits of its absolute value (ordered like the values), and
/// whether something was not finite.
struct Magnitude {
  uint32_t bits = 0;
  bool nonfinite = false;

  __device__ __forceinline__ void add(float value) {
    const uint32_t magnitude = __float_as_uint(value) & 0x7fffffffu;
    if (magnitude >= 0x7f800000u) {
      nonfinite = true;
    } else {
      bits = max(bits, magnitude);
    }
  }
};

/// The larger magnitude, NaN where either is. One instruction in a kernel.
__device__ __forceinline__ float larger_magnitude(float a, float b) {
#ifdef __CUDA_ARCH__
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(fabsf(a)), "f"(fabsf(b)));
  return result;
#else
  return fabsf(a) > fabsf(b) || a != a ? fabsf(a) : fabsf(b);
#endif
}

/// Of a thread's values.
template <int kPieces, int kPiece>
__device__ __forceinline__ Magnitude magnitude_of(const float (&x)[kPieces][kPiece]) {
  float largest = 0.f;
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) largest = larger_magnitude(x[p][i], largest);
  }
  if (largest < INFINITY) return {__float_as_uint(largest), false};
  Magnitude finite;
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) finite.add(x[p][i]);
  }
  return finite;
}

/// The exponent e that puts 2^e * value in [2^14, 2^15); 0 for zero. Denormals count by their
/// leading bit, so -113 <= e <= 163.
__device__ __forceinline__ int scale_exponent(uint32_t bits) {
  if (bits == 0) {
    return 0;
  }
  const int field = static_cast<int>(bits >> 23);
  const int log2 = field > 0 ? field - 127 : 31 - __clz(static_cast<int>(bits)) - 149;
  return 14 - log2;
}

__device__ __forceinline__ float power_of_two(int e) { return __int_as_float((127 + e) << 23); }

/// A row's word, see cutfuse/split.h.
__device__ __forceinline__ int32_t word_of(int exponent, bool nonfinite) {
  return 2 * exponent + (nonfinite ? 1 : 0);
}

/// Converts values with the row's exponent to as many of each plane; non-finite ones become zero.
/// kPlain: there are none, and 2^exponent is finite.
template <bool kPlain = false, int kCount, class Packed>
__device__ __forceinline__ void convert(const float (&x)[kCount], int exponent, Packed& hi,
                                        Packed& lo) {
  static_assert(sizeof(Packed) == kCount * sizeof(__half));
  const float first = power_of_two(min(exponent, 127));
  const float second = power_of_two(exponent - min(exponent, 127));
  __half2 high[kCount / 2];
  __half2 low[kCount / 2];
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    float scaled[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float value = x[2 * i + c];
      scaled[c] = kPlain ? value * first : isfinite(value) ? value * first * second : 0.f;
    }
    high[i] = __floats2half2_rn(scaled[0], scaled[1]);
    const float2 rounded = __half22float2(high[i]);
    low[i] = __floats2half2_rn(scaled[0] - rounded.x, scaled[1] - rounded.y);
  }
  hi = *reinterpret_cast<Packed*>(high);
  lo = *reinterpret_cast<Packed*>(low);
}

/// Merges the magnitudes of the kThreads threads that share a row (one warp, or the whole block).
template <int kThreads>
__device__ __forceinline__ Magnitude merge_row(Magnitude mine) {
  mine.bits = __reduce_max_sync(0xffffffffu, mine.bits);
  if constexpr (kThreads == 32) {
    mine.nonfinite = __any_sync(0xffffffffu, mine.nonfinite);
  } else {
    __shared__ uint32_t of_warp[kThreads / 32];
    if (threadIdx.x % 32 == 0) {
      of_warp[threadIdx.x / 32] = mine.bits;
    }
    mine.nonfinite = __syncthreads_or(mine.nonfinite) != 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) {
      mine.bits = max(mine.bits, of_warp[w]);
    }
  }
  return mine;
}

}  // namespace cutfuse::planes
