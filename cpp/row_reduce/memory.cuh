/// \file
/// Reading elements as fp32, and where a finished row goes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device/online_logsumexp.h"
#include "device/values.cuh"
#include "row_reduce/index.h"
#include "row_reduce/kernels.h"

namespace cutfuse::row_reduce {

/// A word of -inf, or of two.
template <class T>
constexpr uint32_t kMinusInfinity = 0xff800000u;
template <>
inline constexpr uint32_t kMinusInfinity<__half> = 0xfc00fc00u;
template <>
inline constexpr uint32_t kMinusInfinity<__nv_bfloat16> = 0xff80ff80u;

/// kVector elements as they lie in memory: 16 bytes, or one element.
template <class T, int kVector>
struct Raw {
  static_assert(kVector * sizeof(T) == 16);
  uint4 words;

  __device__ static Raw load(const T* x) { return {*reinterpret_cast<const uint4*>(x)}; }
  __device__ static Raw minus_infinity() {
    constexpr uint32_t kWord = kMinusInfinity<T>;
    return {{kWord, kWord, kWord, kWord}};
  }
  __device__ void convert(float* v) const {
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        v[i] = __uint_as_float(word[i]);
      } else {
        const float2 pair = unpack_pair(word[i], kIsHalf ? DType::kFloat16 : DType::kBFloat16);
        v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
      }
    }
  }

 private:
  static constexpr bool kIsHalf = std::is_same_v<T, __half>;
};

template <class T>
struct Raw<T, 1> {
  T value;

  __device__ static Raw load(const T* x) { return {*x}; }
  __device__ static Raw minus_infinity() { return {T(-INFINITY)}; }
  __device__ void convert(float* v) const { *v = static_cast<float>(value); }
};

/// Elements `first`, `first + step`, .. of a row, kVector at a time; -inf from `end` on. All loads
/// are issued before the first is waited for.
template <class T, int kVector, int kLoads>
__device__ __forceinline__ void load_batch(const T* x, const StridedIndex& index, int64_t first,
                                           int step, int64_t end, float (&v)[kVector * kLoads]) {
  Raw<T, kVector> raw[kLoads];
  if (index.count == 1) {
    const T* at = x + first * index.strides[0];
    const int64_t stride = step * index.strides[0];
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
      raw[l] = first + l * step < end ? Raw<T, kVector>::load(at + l * stride)
                                      : Raw<T, kVector>::minus_infinity();
    }
  } else {
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
      const int64_t at = first + l * step;
      raw[l] = at < end ? Raw<T, kVector>::load(x + offset_of(index, at))
                        : Raw<T, kVector>::minus_infinity();
    }
  }
#pragma unroll
  for (int l = 0; l < kLoads; ++l) raw[l].convert(v + l * kVector);
}

/// Part `split` of row `row`: a partial, or the result.
__device__ __forceinline__ void store(const Work& work, int64_t row, unsigned split,
                                      unsigned splits, const LogSumExpPartial& state) {
  const int64_t at = offset_of(work.kept_out, row);
  if (work.partials != nullptr) {
    work.partials[at * splits + split] = state;
  } else {
    store_value(work.out, at, logsumexp_of(state), work.out_dtype);
  }
}

}  // namespace cutfuse::row_reduce
