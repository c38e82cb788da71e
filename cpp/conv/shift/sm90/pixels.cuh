/// \file
/// The pixels of a block whose values a thread holds.
#pragma once

#include "conv/shift/sm90/layout.cuh"

namespace cutfuse::conv::shift::sm90 {

/// Where a thread's values lie: value (j * 2 + r) * 2 + c is of row row0 + 8 r of the weights' tile
/// and of pixel pixel0 + 8 j + c of the block.
template <int kN>
struct PlaneCoordinates {
  static constexpr int kRows = 2;
  static constexpr int kColumnPairs = kN / 8;
  static constexpr int kSize = kN / 2;
  static constexpr int kColumnPairStride = 8;
  static constexpr int kStagedOperands = 0;
  static constexpr bool kPlanes = true;

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
  CUTLASS_DEVICE int64_t column(int j, int c) const {
    bool exists;
    const int32_t at = block.output + position(pixel0 + 8 * j + c, &exists);
    return min(at, p.g.out_height * p.g.out_width - 1);
  }
  CUTLASS_DEVICE int64_t row_offset(int r, const Operand& operand) const {
    const int64_t all = int64_t(p.g.out_channels) * p.g.groups;
    const int64_t row = operand.col_stride != 0 ? image * all + channels[r] : channels[r];
    return row * operand.row_stride;
  }
};

/// A thread's pairs of pixels, one after the other, with the results that they are. A pair lies in
/// one row of the grid.
class Walk {
 public:
  CUTLASS_DEVICE Walk(const Params& p, const Block& block, int32_t pixel0)
      : pitch_(p.g.pitch), gap_(p.g.pitch - block.width), columns_(block.columns) {
    const int32_t column = block.column + pixel0;
    const int32_t row = p.pitch.divide(column);
    column_ = column - row * pitch_;
    skipped_ = row * gap_;
  }
  CUTLASS_DEVICE void next() {
    column_ += 8;
    if (column_ >= pitch_) {
      column_ -= pitch_;
      skipped_ += gap_;
    }
  }
  /// Whether the pair's first and second pixel are results.
  CUTLASS_DEVICE bool first() const { return column_ < columns_; }
  CUTLASS_DEVICE bool second() const { return column_ + 1 < columns_; }
  /// Pixels before the pair that are none.
  CUTLASS_DEVICE int32_t skipped() const { return skipped_; }

 private:
  int32_t pitch_, gap_, columns_;
  int32_t column_, skipped_;
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

/// body(i, whether it is a result of this block's own, the result) for the values of the first
/// row of two.
template <class Coordinates, class Body>
CUTLASS_DEVICE void for_pixels(const Params& p, const Coordinates& at, const Body& body) {
  const int32_t stride = p.g.strip != 0 ? p.g.strip : p.g.block_outputs;
  const int32_t lead = at.block.lead;
  const int32_t last = min(lead + stride, at.block.end - at.block.output);
  Walk walk(p, at.block, at.pixel0);
  CUTLASS_PRAGMA_UNROLL
  for (int j = 0; j < Coordinates::kColumnPairs; ++j) {
    const int32_t result = at.pixel0 + 8 * j - walk.skipped();
    const bool first = walk.first() && result >= lead && result < last;
    body(4 * j, first, result);
    body(4 * j + 1, walk.second() && result + 1 < last, result + 1);
    walk.next();
  }
}

}  // namespace cutfuse::conv::shift::sm90
