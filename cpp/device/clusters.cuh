/// \file
/// Blocks of a cluster: compute capability 9.0 and later.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace cutfuse {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

/// By all threads of all blocks: what they wrote to shared memory before, all see afterwards.
__device__ __forceinline__ void sync_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/// The place in shared memory of block `rank` that `own` is in this block's.
template <class T>
__device__ __forceinline__ const T* shared_of(const T* own, uint32_t rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const T* place;
  asm("mapa.u64 %0, %1, %2;" : "=l"(place) : "l"(own), "r"(rank));
  return place;
#else
  return own;
#endif
}

}  // namespace cutfuse
