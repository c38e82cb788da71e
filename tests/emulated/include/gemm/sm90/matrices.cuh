#pragma once

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

}  // namespace cutfuse::gemm::sm90
