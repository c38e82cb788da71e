/// \file
/// Where a thread's wgmma accumulators lie in the result.
#pragma once

#include "gemm/coordinates.cuh"

namespace cutfuse::gemm::sm90 {

/// More operands than these are read step by step.
inline constexpr int staged_operands(int tile_n) {
  return tile_n <= 128 ? 14 : tile_n == 192 ? 8 : 6;
}

/// Of an m64nN tile, of which a warp has 16 rows.
template <int kTileN, int kRowStep = 8, int kOperands = staged_operands(kTileN)>
struct AccumulatorCoordinates : FragmentCoordinates<2, kTileN / 8, kTileN, kOperands, kRowStep> {};

/// The first of a thread's two rows in a tile, kRowStep before the other; 4: as nchw_mainloop.cuh
/// reads pixels; 1: as turned_mainloop.cuh reads rows.
template <int kRowStep>
CUTLASS_DEVICE int first_row_of(int thread) {
  const int warp = thread / 32;
  const int row = thread % 32 / 4;
  if constexpr (kRowStep == 8) {
    return warp * 16 + row;
  } else if constexpr (kRowStep == 1) {
    return warp * 16 + row * 2;
  } else {
    return warp / 2 * 32 + warp % 2 * 8 + row % 4 + row / 4 * 16;
  }
}

}  // namespace cutfuse::gemm::sm90
