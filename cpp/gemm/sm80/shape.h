/// \file
/// Compile-time shape of an sm_80 GEMM kernel, and where its tiles lie in shared memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cutfuse/gemm.h"
#include "cutfuse/types.h"

namespace cutfuse::gemm::sm80 {

/// Of the fp16 products, K of one mma.sync.
inline constexpr int kMmaK = 16;

/// Opt-in limit of 8.6, 8.9 and 12.0, the smallest of the architectures.
inline constexpr int kMaxSharedBytes = 99 << 10;

/// One row of instances.cmake.
template <DType kElement_, int kTileM_, int kTileN_, int kWarpM_, int kWarpN_, int kTileK_,
          int kStages_, int kPromoteK_, Source kSource_ = Source::kMatrix>
struct Shape {
  static constexpr Source kSource = kSource_;
  static constexpr DType kElement = kElement_;
  static constexpr int kTileM = kTileM_, kTileN = kTileN_, kTileK = kTileK_;
  static constexpr int kWarpM = kWarpM_, kWarpN = kWarpN_;
  static constexpr int kStages = kStages_;
  static constexpr int kPromoteK = kPromoteK_;
  static constexpr int kPlanes = kPromoteK == 0 ? 1 : 2;

  static constexpr int kWarpsM = kTileM / kWarpM;
  static constexpr int kWarpsN = kTileN / kWarpN;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kSize = kWarpM * kWarpN / 32;   // accumulators of a thread
  static constexpr int kBlocksPerSm = 256 / kThreads;  // of up to 255 registers a thread

  static constexpr int kRowBytes = kTileK * 2;
  static constexpr int kVectors = kRowBytes / 16;
  static constexpr int kPlaneBytesA = kTileM * kRowBytes;
  static constexpr int kPlaneBytesB = kTileN * kRowBytes;
  static constexpr int kStageBytes = kPlanes * (kPlaneBytesA + kPlaneBytesB);
  static constexpr int kSharedBytes = kStages * kStageBytes;

  static_assert(kTileK == 32 || kTileK == 64);
  static_assert(kPromoteK == 0 || kPromoteK == kMmaK || kPromoteK == kTileK);
  static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0 && kTileM % kWarpM == 0 &&
                kTileN % kWarpN == 0);
  static_assert(kStages >= 2 && kSharedBytes <= kMaxSharedBytes);
};

/// Byte offset of 16-byte vector `vector` of row `row` in a tile: the vectors of a row are permuted
/// so that the eight rows that ldmatrix reads at once, and the vectors that eight threads copy at
/// once, lie in different banks.
template <int kRowBytes>
constexpr int tile_offset(int row, int vector) {
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  const int flips = kRowBytes == 128 ? row & 7 : row >> 1 & 3;
  return row * kRowBytes + ((vector ^ flips) << 4);
}

/// The order in which blocks take tiles: `swizzle` along the minor side, then on along the major
/// one, so that the blocks in flight share operand tiles in L2. The last group may be smaller.
struct TileOrder {
  int32_t tiles_m = 0, tiles_n = 0;
  int32_t swizzle = 1;  ///< at most the tiles along the minor side
  bool along_n = false;
};

struct Tile {
  int32_t m, n;
};

constexpr Tile tile_of(const TileOrder& order, int32_t block) {
  const int32_t major_tiles = order.along_n ? order.tiles_n : order.tiles_m;
  const int32_t minor_tiles = order.along_n ? order.tiles_m : order.tiles_n;
  const int32_t first = block / (order.swizzle * major_tiles) * order.swizzle;
  const int32_t left = minor_tiles - first;
  const int32_t group = left < order.swizzle ? left : order.swizzle;
  const int32_t within = block - first * major_tiles;
  const int32_t minor = first + within % group;
  const int32_t major = within / group;
  return order.along_n ? Tile{minor, major} : Tile{major, minor};
}

}  // namespace cutfuse::gemm::sm80
