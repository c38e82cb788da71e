/// \file
/// Shared memory by address, and copies from global memory that a thread does not wait for: what
/// sm_80 and later share.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace cutfuse {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// What the launch gives of shared memory.
__device__ __forceinline__ unsigned char* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char shared[];
  return shared;
}

/// Two words at a multiple of 8.
__device__ __forceinline__ int2 load_shared(uint32_t address) {
  int2 words;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
               : "=r"(words.x), "=r"(words.y)
               : "r"(address)
               : "memory");
  return words;
}

__device__ __forceinline__ uint32_t load_shared_word(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

/// Copies `bytes` of 4, 8 or 16, the rest zeros, to shared memory without waiting for them.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from, int bytes) {
  const uint32_t address = shared_address(to);
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
                 "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from),
                 "n"(kBytes), "r"(bytes)
                 : "memory");
  }
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most kPending of this thread's commits are on their way.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace cutfuse
