/// \file
/// 8x8 matrices of 16-bit elements between a warp's registers and shared memory. Lane l gives the
/// address of row l % 8 of matrix l / 8; it holds two neighbours of row l / 4 of each.
/// Source: PTX ISA, "Matrix fragments for mma.m16n8k16".
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace cutfuse::gemm::sm90 {

__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

/// Transposed: of each it holds two neighbours of column l / 4.
__device__ __forceinline__ void store_transposed(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}

/// Transposed: of each it gets two neighbours of column l / 4.
__device__ __forceinline__ void load_transposed(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

}  // namespace cutfuse::gemm::sm90
