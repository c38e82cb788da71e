/// \file
/// Moments as they lie in memory.
#pragma once

namespace cutfuse {

/// Mean of some values and the sum of their squared deviations from it.
struct alignas(8) Moments {
  float mean;
  float m2;
};

/// Rows that one partial of a GEMM epilogue covers: those of one warpgroup's tile.
inline constexpr int kPartialRows = 64;

}  // namespace cutfuse
