/// \file
/// Flat index -> offset, on the host and in kernels.
#pragma once

#include <cuda_runtime_api.h>  // __host__ and __device__, which are nothing to a C++ compiler

#include <cstdint>

#include "cutfuse/row_reduce.h"

namespace cutfuse::row_reduce {

/// index / size for index >= 0 and size > 0. Division of 32-bit numbers is four times as fast.
__host__ __device__ inline int64_t quotient(int64_t index, int64_t size) {
  if (((index | size) >> 32) == 0) {
    return static_cast<uint32_t>(index) / static_cast<uint32_t>(size);
  }
  return index / size;
}

__host__ __device__ inline int64_t offset_of(const StridedIndex& dims, int64_t index) {
  int64_t offset = 0;
#ifdef __CUDA_ARCH__
#pragma unroll 1  // kernels hold this up to 32 times
#endif
  for (int32_t d = dims.count - 1; d > 0; --d) {
    const int64_t next = quotient(index, dims.sizes[d]);
    offset += (index - next * dims.sizes[d]) * dims.strides[d];
    index = next;
  }
  return offset + index * dims.strides[0];
}

}  // namespace cutfuse::row_reduce
