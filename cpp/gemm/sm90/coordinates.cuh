/// \file
/// Where a thread's wgmma accumulators lie in the result.
#pragma once

#include "gemm/coordinates.cuh"

namespace cutfuse::gemm::sm90 {

/// Of an m64nNk16 tile, of which a warp has 16 rows. More operands than these are read step by
/// step.
template <int kTileN>
struct AccumulatorCoordinates : FragmentCoordinates<2, kTileN / 8, kTileN,
                                                    (kTileN == 128   ? 14
                                                     : kTileN == 192 ? 8
                                                                     : 6)> {};

}  // namespace cutfuse::gemm::sm90
