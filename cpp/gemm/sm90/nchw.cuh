/// \file
/// Accumulators of pixels to the planes of NCHW.
#pragma once

#include <cutlass/cutlass.h>

#include "gemm/images.cuh"
#include "gemm/sm90/store.cuh"

namespace cutfuse::gemm::sm90 {

/// Of a warpgroup's 64 pixels 16 channels at a time are turned in shared memory, so that 32 pixels
/// of a channel leave together: 94 us of a GEMM that took 225 with a sector a store, as registers
/// hold them (64 images of 64x56x56 to 256 channels, H200).
template <int kTileN, class Coordinates>
CUTLASS_DEVICE void store_nchw(const float (&v)[Coordinates::kSize], const Coordinates& at,
                               int thread, const Matrix& out, WarpStorage<kTileN>* warps) {
  constexpr int kRowStep = Coordinates::kRowStep;
  constexpr int kPixels = 64;
  constexpr int kChannels = 16;
  constexpr int kStage = kPixels * kChannels;
  static_assert(2 * kStage * sizeof(float) <= 4 * sizeof(WarpStorage<kTileN>));
  auto* stages = reinterpret_cast<float*>(warps);
  int lane = thread % 32;
  keep_here(lane);
  const int warp = thread / 32 % 4;
  const int own_row = first_row_of<kRowStep>(warp * 32 + lane);
  const int first_row = at.row0 - own_row;
  const int first_column = at.column0 - lane % 4 * 2;
  const int64_t pixels = at.images->out_pixels();
  int64_t offsets[2];
  bool inside[2];
  CUTLASS_PRAGMA_UNROLL
  for (int half = 0; half < 2; ++half) {
    const auto [offset, is_inside] =
        plane_pixel(*at.images, first_row + 32 * half + lane, at.columns);
    inside[half] = is_inside;
    offsets[half] = offset + (first_column + warp * 4) * pixels;
  }
  // Two bits of a pixel are flipped by those of its channel, so that banks do not conflict.
  const int to = lane % 4 * 2 * kPixels + (own_row ^ lane % 4 * kRowStep);
  const int from = warp * 4 * kPixels;
  const int column = first_column + warp * 4;
  const auto store = [&](auto wide) {
    const DType dtype = decltype(wide)::value ? DType::kFloat32 : out.dtype;
    CUTLASS_PRAGMA_UNROLL
    for (int number = 0; number < kTileN / kChannels; ++number) {
      const int stage = number % 2 * kStage;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8; ++i) {
        const int j = 2 * number + i / 4, r = i / 2 % 2, c = i % 2;
        stages[(to ^ kRowStep * r) + stage + (8 * (i / 4) + c) * kPixels] = v[(j * 2 + r) * 2 + c];
      }
      sync_group(thread);
      // Computed here, or the addresses of all chunks would be kept, and spilled.
      CUTLASS_PRAGMA_UNROLL
      for (int64_t& offset : offsets) asm volatile("" : "+l"(offset));
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int pixel = lane ^ (warp * 2 + i / 2) % 4 * kRowStep;
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < 2; ++half) {
          if (inside[half] && column + number * kChannels + i < at.columns) {
            store_value(out.data, offsets[half],
                        stages[stage + from + i * kPixels + 32 * half + pixel], dtype);
          }
          offsets[half] += i < 3 ? pixels : (kChannels - 3) * pixels;
        }
      }
    }
  };
  if (out.dtype == DType::kFloat32) {
    store(cute::true_type{});
  } else {
    store(cute::false_type{});
  }
}

}  // namespace cutfuse::gemm::sm90
