/// \file
/// The pixels of a block whose values a thread holds.
#pragma once

#include "conv/shift/sm90/layout.cuh"

namespace cutfuse::conv::shift::sm90 {

/// Where a thread's values lie: value (j * 2 + r) * 2 + c is of row row0 + 8 r of the weights' tile
/// and of pixel pixel0 + 8 j + c of the block.
template <int kN>
struct PlaneCoordinates {
  static constexpr int kColumnPairs = kN / 8;

  const Params& p;
  const Block& block;
  int32_t channels[2];  // in all groups; clamped to those that exist
  int64_t image;
  int32_t pixel0;

  /// Result, within its run, of a pixel of the block.
  CUTLASS_DEVICE int32_t position(int32_t pixel, bool* exists) const {
    const int32_t column = block.column + pixel;
    const int32_t row = p.pitch.divide(column);
    *exists = column - row * p.g.pitch < block.columns;
    return pixel - row * (p.g.pitch - block.width);
  }
};

/// Of a thread's pairs, bit j is pair j: whether its pixel `second` is a result of the block's own.
template <class Coordinates>
CUTLASS_DEVICE uint32_t own_pixels(const Params& p, const Coordinates& at, int32_t second) {
  static_assert(Coordinates::kColumnPairs <= 32);
  const Block& block = at.block;
  const int32_t stride = p.g.strip != 0 ? p.g.strip : p.g.block_outputs;
  const int32_t gap = p.g.pitch - block.width;
  const int32_t pixel0 = at.pixel0 + second;
  const auto pairs_below = [&](int32_t pixel) {  // those whose pixel is less, as bits
    const int32_t count = min(max((pixel - pixel0 + 7) >> 3, 0), Coordinates::kColumnPairs);
    return uint32_t((uint64_t(1) << count) - 1);
  };
  int32_t last = min(block.lead + stride, block.end - block.output);
  uint32_t own = 0;
#pragma unroll 1
  for (int32_t row = -block.column; row < 8 * Coordinates::kColumnPairs;
       row += p.g.pitch, last += gap) {
    own |= pairs_below(min(row + block.columns, last)) & ~pairs_below(max(row, block.lead));
  }
  return own;
}

/// body(i, whether it is a result of this block's own) for the values of the first row of two.
/// kPairs: runs begin and end with a pair.
template <bool kPairs, class Coordinates, class Body>
CUTLASS_DEVICE int32_t for_own_pixels(const Params& p, const Coordinates& at, const Body& body) {
  const uint32_t first = own_pixels(p, at, 0);
  const uint32_t second = kPairs ? first : own_pixels(p, at, 1);
  CUTLASS_PRAGMA_UNROLL
  for (int j = 0; j < Coordinates::kColumnPairs; ++j) {
    body(4 * j, (first >> j & 1) != 0);
    body(4 * j + 1, (second >> j & 1) != 0);
  }
  return __popc(first) + __popc(second);
}

}  // namespace cutfuse::conv::shift::sm90
