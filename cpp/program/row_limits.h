/// \file
/// What passes over a matrix by row_tile.cuh take, for host code.
#pragma once

#include <cstdint>

namespace cutfuse::row_tile {

inline constexpr int kColumns = 4;  // of one thread: a 16-byte access
inline constexpr int kLanes = 32;
inline constexpr int64_t kMaxColumns = int64_t(65535) * kLanes * kColumns;  // more were not tried

}  // namespace cutfuse::row_tile
