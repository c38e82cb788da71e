/// \file
/// Meetings of a part of a block.
#pragma once

#include <cuda_runtime.h>

namespace cutfuse {

/// Waits for `threads` threads, whole warps, at barrier `name`, 0 (__syncthreads' own) to 15.
__device__ __forceinline__ void sync_threads(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

}  // namespace cutfuse
