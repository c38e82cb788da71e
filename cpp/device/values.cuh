/// \file
/// Reading and writing elements whose type is known at run time; the branches are uniform.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cutfuse/types.h"

namespace cutfuse {

/// data[index] of a read-only tensor.
__device__ __forceinline__ float load_value(const void* data, int64_t index, DType dtype) {
  if (dtype == DType::kFloat32) {
    return __ldg(static_cast<const float*>(data) + index);
  }
  const unsigned short bits = __ldg(static_cast<const unsigned short*>(data) + index);
  return dtype == DType::kBFloat16 ? __uint_as_float(uint32_t(bits) << 16)
                                   : __half2float(__ushort_as_half(bits));
}

/// data[index] of memory that this kernel may also write.
__device__ __forceinline__ float load_mutable(const void* data, int64_t index, DType dtype) {
  if (dtype == DType::kFloat32) {
    return static_cast<const float*>(data)[index];
  }
  const unsigned short bits = static_cast<const unsigned short*>(data)[index];
  return dtype == DType::kBFloat16 ? __uint_as_float(uint32_t(bits) << 16)
                                   : __half2float(__ushort_as_half(bits));
}

/// Two 16-bit values of one word, the first in its low half.
__device__ __forceinline__ float2 unpack_pair(uint32_t word, DType dtype) {
  if (dtype == DType::kBFloat16) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
  }
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}

__device__ __forceinline__ uint32_t pack_pair(float a, float b, DType dtype) {
  if (dtype == DType::kBFloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  const __half2 pair = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ void store_value(void* data, int64_t index, float value, DType dtype) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[index] = value;
  } else {
    static_cast<unsigned short*>(data)[index] =
        static_cast<unsigned short>(pack_pair(value, 0.f, dtype));
  }
}

}  // namespace cutfuse
