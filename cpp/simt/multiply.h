/// \file
/// Small products with their program in one launch: summed by fp32 units as they are, without
/// tensor cores and planes, at every tier alike.
#pragma once

#include <cstdint>

#include "core/status.h"
#include "cutfuse/types.h"
#include "program/device_program.h"

namespace cutfuse::simt {

/// A block's tile of the result, whose K `groups` of its warps share out.
struct Tile {
  int32_t m, n, groups;
};

/// Those that are compiled.
inline constexpr Tile kTiles[] = {{64, 64, 1}, {32, 32, 2}, {32, 32, 4}, {64, 8, 4}, {8, 64, 4}};

/// Of a compiled tile, its index in kTiles; of others -1.
int32_t index_of(const Tile& tile) noexcept;

/// Groups of tiles that a cluster of `blocks` blocks may hold, which share K out once more.
inline constexpr int32_t kClusteredGroups = 4;
inline constexpr int32_t kMostBlocks = 8;

/// Whether no more than about 32 roundings of a tile's sums of k products follow each other, as
/// with more they have more error than some of PyTorch's kernels.
bool sums(const Tile& tile, int32_t blocks, int64_t k) noexcept;

/// out[m][n] = program(sum over K of x[m][k] * weight[n][k]); x and weight have one dtype and any
/// strides, out any dtype. Deterministic. Launches on `stream` of the current device; M, N < 2^30.
Status multiply(const ConstMatrix& x, const ConstMatrix& weight, int64_t m, int64_t n, int64_t k,
                int32_t tile, int32_t blocks, const DeviceProgram& program, const Matrix& out,
                void* stream) noexcept;

}  // namespace cutfuse::simt
