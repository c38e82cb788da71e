#pragma once

#include "cuda_fp16.h"
#include "cutfuse/types.h"
#include "device/copies.cuh"

namespace cutfuse::gemm::sm80 {

inline void copy_async(uint32_t to, const void* from, bool inside) {
  const bool aligned = to % 16 == 0 && (!inside || reinterpret_cast<uintptr_t>(from) % 16 == 0);
  if (!aligned) std::abort();
  if (inside) {
    std::memcpy(emulated::here->shared + to, from, 16);
  } else {
    std::memset(emulated::here->shared + to, 0, 16);
  }
}

inline void load_matrices(uint32_t address, uint32_t& r0, uint32_t& r1, uint32_t& r2,
                          uint32_t& r3) {
  const unsigned lane = threadIdx.x % 32;
  uint32_t* const to[] = {&r0, &r1, &r2, &r3};
  for (unsigned i = 0; i < 4; ++i) {
    const uint32_t row = emulated::of_lane(address, 8 * i + lane / 4);
    std::memcpy(to[i], emulated::here->shared + row + lane % 4 * 4, 4);
  }
}

struct Factors {
  uint32_t a[4], b[2];
};

template <DType kElement>
float half_of(uint32_t word, int which) {
  const auto bits = static_cast<uint16_t>(word >> 16 * which);
  return kElement == DType::kFloat16 ? __half2float(__ushort_as_half(bits))
                                     : __uint_as_float(uint32_t(bits) << 16);
}

/// m16n8k16, rounded once. Blocks of a cluster run at the same time.
template <DType kElement, bool kAdds>
void multiply_add(float* d, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static Factors all[16 * emulated::kMostThreads];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Factors* warp = all + (emulated::here->number - lane);
  warp[lane] = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  emulated::meet_warp();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8;
    const int column = lane % 4 * 2 + i % 2;
    double sum = kAdds ? d[i] : 0.f;
    for (int k = 0; k < 16; ++k) {
      const uint32_t left = warp[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2];
      const uint32_t right = warp[column * 4 + k % 8 / 2].b[k / 8];
      sum += double(half_of<kElement>(left, k % 2)) * half_of<kElement>(right, k % 2);
    }
    d[i] = static_cast<float>(sum);
  }
  emulated::meet_warp();
}

}  // namespace cutfuse::gemm::sm80
