/// \file
/// The pixels of a block whose values a thread holds, and what becomes of statistics of them.
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

/// One warp's statistics of a channel's values so far, spread over its threads.
struct Running {
  float mean = 0.f;
  float m2 = 0.f;
  int32_t count = 0;

  CUTLASS_DEVICE void add(float other_mean, float other_m2, int32_t other) {
    const int32_t all = count + other;
    const float weight = all > 0 ? float(other) / float(all) : 0.f;
    const float delta = other_mean - mean;
    mean = fmaf(delta, weight, mean);
    m2 += other_m2 + delta * delta * (float(count) * weight);
    count = all;
  }
};

}  // namespace cutfuse::conv::shift::sm90
