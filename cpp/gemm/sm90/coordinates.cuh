/// \file
/// Where a thread's wgmma accumulators lie in the result.
#pragma once

#include "gemm/coordinates.cuh"

namespace cutfuse::gemm::sm90 {

/// Of an m64nNk16 tile, of which a warp has 16 rows.
template <int kTileN>
struct AccumulatorCoordinates
    : FragmentCoordinates<2, kTileN / 8, kTileN, (kTileN > 128 ? 15 : 31)> {};

}  // namespace cutfuse::gemm::sm90
