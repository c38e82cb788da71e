/// \file
/// The instructions of sm_80 that the mainloop is made of.
/// Source of the fragments' layouts: PTX ISA, "Matrix fragments for mma.m16n8k16".
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cutfuse/types.h"
#include "device/copies.cuh"

namespace cutfuse::gemm::sm80 {

/// Copies 16 bytes, or writes 16 zeros without reading. The next tile of K is the rest of the
/// 128-byte line where a row of the tile is 64 bytes.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(inside ? 16 : 0)
               : "memory");
}

/// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t& r0, uint32_t& r1,
                                              uint32_t& r2, uint32_t& r3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(address));
}

/// d = a * b, or d += a * b if kAdds: a is 16x16, b 16x8, d 16x8 in fp32.
template <DType kElement, bool kAdds>
__device__ __forceinline__ void multiply_add(float* d, const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]) {
  static_assert(kElement != DType::kFloat32);
  const float c0 = kAdds ? d[0] : 0.f;
  const float c1 = kAdds ? d[1] : 0.f;
  const float c2 = kAdds ? d[2] : 0.f;
  const float c3 = kAdds ? d[3] : 0.f;
  if constexpr (kElement == DType::kFloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c0), "f"(c1),
          "f"(c2), "f"(c3));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c0), "f"(c1),
          "f"(c2), "f"(c3));
  }
}

}  // namespace cutfuse::gemm::sm80
