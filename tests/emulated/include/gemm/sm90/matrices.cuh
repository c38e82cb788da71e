#pragma once

#include <cstdlib>
#include <cstring>

#include "machine.h"

namespace cutfuse::gemm::sm90 {

inline void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
  const unsigned lane = threadIdx.x % 32;
  for (unsigned i = 0; i < 4; ++i) {
    const uint32_t row = emulated::of_lane(address, 8 * i + lane / 4);
    std::memcpy(emulated::here->shared + row + lane % 4 * 4, &r[i], 4);
  }
}

inline void store_transposed(uint32_t address, const uint32_t (&r)[4]) {
  const unsigned lane = threadIdx.x % 32;
  for (unsigned i = 0; i < 8; ++i) {
    const uint32_t row = emulated::of_lane(address, 8 * (i / 2) + lane % 4 * 2 + i % 2);
    if (row % 16 != 0) std::abort();
    std::memcpy(emulated::here->shared + row + lane / 4 * 2,
                reinterpret_cast<const unsigned char*>(&r[i / 2]) + i % 2 * 2, 2);
  }
}

inline void load_transposed(uint32_t address, uint32_t (&r)[4]) {
  const unsigned lane = threadIdx.x % 32;
  for (unsigned i = 0; i < 8; ++i) {
    const uint32_t row = emulated::of_lane(address, 8 * (i / 2) + lane % 4 * 2 + i % 2);
    if (row % 16 != 0) std::abort();
    std::memcpy(reinterpret_cast<unsigned char*>(&r[i / 2]) + i % 2 * 2,
                emulated::here->shared + row + lane / 4 * 2, 2);
  }
}

}  // namespace cutfuse::gemm::sm90
