/// \file
/// Runs a program's steps on a block's results. They wait in shared memory, each lane's own, and a
/// lane takes 16 at a time: left in registers, all 128 of them, the interpreter spilled.
#pragma once

#include "conv/shift/sm90/pixels.cuh"
#include "program/executor.cuh"

namespace cutfuse::conv::shift::sm90 {

/// Where 16 of a thread's values lie: of one channel, value 2 j + c of pixel `pixel` + 8 j + c.
template <int kN>
struct StepCoordinates {
  static constexpr int kRows = 1;
  static constexpr int kColumnPairs = 8;
  static constexpr int kSize = 16;
  static constexpr int kColumnPairStride = 8;
  static constexpr int kStagedOperands = 0;
  static constexpr bool kPlanes = true;

  const PlaneCoordinates<kN>& at;
  int32_t channel;  // in all groups; clamped to those that exist
  int32_t pixel;    // of the block

  /// Elements of a tensor as large as the images made; legal() of their sum.
  CUTLASS_DEVICE int64_t column(int j, int c) const {
    const Params& p = at.p;
    bool exists;
    const int32_t result = at.block.output + at.position(pixel + 8 * j + c, &exists);
    if (p.g.made.phases() == 1) return result;
    const int32_t row = p.out_width.divide(result);
    return row * p.g.made.up_h * int64_t(p.g.made.width) +
           (result - row * p.g.out_width) * p.g.made.up_w;
  }
  CUTLASS_DEVICE int64_t row_offset(int, const Operand& operand) const {
    const Params& p = at.p;
    const Interleave& made = p.g.made;
    const int64_t row = p.phases_made.divide(channel);
    if (operand.col_stride == 0) return row * operand.row_stride;
    const MadeChannel phase = made_channel(p.g, channel);
    const int64_t all = p.phases_made.divide(p.g.out_channels * p.g.groups);
    return (at.image * all + row) * operand.row_stride +
           (phase.phase_h - made.crop_h) * int64_t(made.width) + phase.phase_w - made.crop_w;
  }
  /// An element of such a tensor, for pixels that are no results too.
  CUTLASS_DEVICE int64_t legal(int64_t element) const {
    const Params& p = at.p;
    const int64_t planes = int64_t(p.g.batch) * p.phases_made.divide(p.g.out_channels * p.g.groups);
    const int64_t last = planes * p.g.made.height * p.g.made.width - 1;
    return max(int64_t(0), min(element, last));
  }
};

/// v = the steps from `first_staged` on of v, for the thread's row kRow. `scratch` has room for
/// kN / 4 values of each lane.
template <int kRow, int kN>
CUTLASS_DEVICE void run_steps_of(const Params& p, float (&v)[kN / 2],
                                 const PlaneCoordinates<kN>& at, float* scratch) {
  constexpr int kSize = StepCoordinates<kN>::kSize;
  float* mine = scratch + int(threadIdx.x) % 32;
  CUTLASS_PRAGMA_UNROLL
  for (int k = 0; k < kN / 4; ++k) mine[32 * k] = v[(k / 2 * 2 + kRow) * 2 + k % 2];
#pragma unroll 1
  for (int first = 0; first < kN / 4; first += kSize) {
    const StepCoordinates<kN> here{at, at.channels[kRow], at.pixel0 + 4 * first};
    float* from = mine + 32 * first;
    float some[kSize];
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < kSize; ++k) some[k] = from[32 * k];
    execute(p.program, some, here, p.first_staged);
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < kSize; ++k) from[32 * k] = some[k];
  }
  CUTLASS_PRAGMA_UNROLL
  for (int k = 0; k < kN / 4; ++k) v[(k / 2 * 2 + kRow) * 2 + k % 2] = mine[32 * k];
}

template <int kN>
CUTLASS_DEVICE void run_steps(const Params& p, float (&v)[kN / 2], const PlaneCoordinates<kN>& at,
                              float* scratch) {
  run_steps_of<0>(p, v, at, scratch);
  if (p.g.warp_channels > 8) run_steps_of<1>(p, v, at, scratch);
}

}  // namespace cutfuse::conv::shift::sm90
