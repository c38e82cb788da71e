/// \file
/// The shift kernel's parameters, and the handle that launches it. No CUTLASS here.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "conv/shift/geometry.h"
#include "cutfuse/batch_norm.h"
#include "cutfuse/device.h"
#include "cutfuse/status.h"
#include "cutfuse/types.h"
#include "device/counted_moments.h"
#include "program/device_program.h"

namespace cutfuse::conv::shift {

/// Weights w[k][c][r][s] of group g, whatever torch's layout is; strides may be negative. k is a
/// channel made, whose phase shifts the filter.
struct WeightView {
  const void* data = nullptr;
  int64_t group = 0, k = 0, c = 0, r = 0, s = 0;
  int64_t phase_h = 0, phase_w = 0;

  static constexpr int64_t kNoTap = INT64_MIN;

  /// Element of the tap of an output channel, or kNoTap if the filter ends before it.
  constexpr int64_t index(const Geometry& g, int32_t of_group, const MadeChannel& to, int32_t from,
                          int32_t tap_h, int32_t tap_w) const {
    const Interleave& made = g.made;
    if (to.phase_h + made.up_h * (g.kernel_h - 1 - tap_h) >= made.kernel_h ||
        to.phase_w + made.up_w * (g.kernel_w - 1 - tap_w) >= made.kernel_w) {
      return kNoTap;
    }
    return of_group * group + to.channel * k + from * c + tap_h * r + tap_w * s +
           to.phase_h * phase_h + to.phase_w * phase_w;
  }
};

/// A row's weights are packed times 2^exponent; one word says so and whether all are finite.
struct RowExponent {
  int32_t word;

  static constexpr RowExponent make(int32_t exponent, bool finite) {
    return {exponent * 2 + (finite ? 0 : 1)};
  }
  constexpr int32_t exponent() const { return word >> 1; }
  constexpr bool finite() const { return (word & 1) == 0; }
};

/// Offsets in dynamic shared memory, in bytes.
struct SharedLayout {
  int32_t patch = 0;  // [stage, unless there is a ring][plane][lane group][pixel][8]
  int32_t group_bytes = 0, plane_bytes = 0, stage_bytes = 0;
  int32_t weights = 0;  // [slab][step][plane][half of 8 of K][row][8]
  int32_t slab_bytes = 0;
  int32_t last_slab_bytes = 0;  // of the last one's steps; slabs that come through a ring are whole
  int32_t staging = 0;          // [warp that has channels][box of 8 rows]
  int32_t staging_boxes = 2;    // of eight rows, of each warp
  int32_t rows = 0;             // RowConstants of the m tile
  int32_t lanes = 0;            // Lanes
  int32_t raw = 0;              // [producer warp][turn] of 32 pixels of eight channels, as in x;
                                // or [piece][channel][row], last: [piece][row][pixel][8]
  int32_t sends = 0;            // [warp][row]: what a bulk store is told
  int32_t control = 0;
  int32_t total = 0;
};

/// How the two warpgroups that multiply alternate.
enum class Turns {
  kNone,
  kOfTiles,   ///< one multiplies while the other stores
  kOfIssues,  ///< the same, but a turn ends when the last products are on their way; one plane
  kOfSums,    ///< at ieee: one multiplies while the other promotes
};

struct Params {
  CUtensorMap map;  // of x, where the copy engine brings it in pieces
  Geometry g;
  SharedLayout shared;
  Divisor pitch, out_width, m_tiles, strips;
  Divisor tiles_of_outer, tiles_of_image;  // of one strip
  Divisor phases_made;
  int32_t tiles_of_strip = 0;  // of all images and outer ones
  int32_t walk = 1;            // tiles that a block takes one after the other, or fewer
  int32_t walks = 0;           // of all strips
  Turns turns = Turns::kNone;

  /// A kernel before this one has waited for those before it: x is complete, and only what is
  /// prepared need be waited for.
  bool x_is_complete = false;
  const void* x = nullptr;
  int64_t x_image = 0, x_channel = 0, x_row = 0, x_column = 0;
  uint32_t channel_bytes = 0, row_bytes = 0, column_bytes = 0;  // the same strides
  DType dtype = DType::kFloat32;
  // How lane-channels lie; the first that is true counts.
  bool one_phase = false;
  bool lanes_are_channels = false;  // of one phase each; else phases lie next to each other
  bool phase_masks = false;         // so that 8, or each group of lanes, repeat them
  int32_t last_phase = 0;           // a power of two less one, or 0
  bool channels_together = false;   // 16 bytes of them are one aligned load: channels_last;
                                    // in a piece a pixel's eight are next to each other
  bool lane_pairs = false;          // two lane-channels, from an even one on, are one aligned load
  bool in_pieces = false;           // x comes by the copy engine, else by each lane's own copies
  int32_t lanes_together = 1;       // in a piece: lane-channels that are one load
  Divisor piece_groups;             // groups of lane-channels that a piece has
  WeightView weight;                // to repair
  const void* packed = nullptr;     // [group, m tile][slab] tiles
  const int32_t* exponents = nullptr;  // [group, m tile][row], as RowExponent has them

  void* out = nullptr;
  bool in_runs = false;        // fp32 results that follow each other do so in memory: NCHW
  bool channels_last = false;  // else they are interleaved
  bool pairs = false;          // every run of results begins at an even float
  int32_t out_phase = 0;       // floats from a sector's start to `out`
  DeviceProgram program;
  // Its first `affine_steps` are folded into one, perhaps bounds follow; Role::kAny and
  // kLast run the steps from `first_staged` on, on results in shared memory.
  int32_t affine_steps = 0;
  int32_t first_staged = 0;
  bool clamps = false;
  float lowest = 0.f, highest = 0.f;
  CountedMoments* partials = nullptr;  // [channel][partial_count]; not null: nothing is stored
  int32_t partial_count = 0;
  float promotion = 1.f, promotion2 = 1.f;
  int32_t steps_at_once = kSlabSteps;  // that are promoted together, at ieee

  int32_t chunk_slab[kMaxChunks + 1] = {};  // first slab of each chunk
  int32_t chunk_steps[kMaxChunks] = {};
  /// Of each step, slabs padded: distance of its first half from the patch's start >> 4, and of
  /// its second half from the first >> 4, in the high word: both as a descriptor has them. Of a
  /// ring of rows for every row that a block may begin in.
  uint32_t steps[kMaxSteps + 1] = {};
};

/// What prepares a launch: packs the weight, and batch norm's multipliers in eval or, in training,
/// clears the partials of its statistics.
struct PrepareParams {
  Geometry g;
  WeightView weight;
  DType dtype = DType::kFloat32;
  int32_t planes = 1;
  DType element = DType::kFloat16;
  int32_t steps = 0;       // slabs padded
  void* packed = nullptr;  // null: nothing to pack
  int32_t* exponents = nullptr;
  float* multipliers = nullptr;  // [out_channels of all groups]: weight / sqrt(var + eps); or null
  BatchNormBuffers batch_norm;
  uint32_t* cleared = nullptr;  // or null; then there are no multipliers
  int64_t cleared_words = 0;
  Half halves[2 * kMaxSteps] = {};
};

Status prepare(const PrepareParams& params, void* stream) noexcept;

/// What a kernel does with results. What it does not cost it no registers.
enum class Role {
  kStore,       ///< affine steps, then perhaps bounds; in runs
  kStatistics,  ///< the same; batch norm's statistics
  kLast,        ///< any program; stores channels_last
  kAny,         ///< any program; either, in any order
};

/// One row of instances.cmake.
struct Instance {
  DType element;
  int32_t tile_n, planes;
  Role role;
  Status (*launch)(const Params&, const DeviceProps&, void* stream) noexcept;
};

const Instance* instances(int32_t* count) noexcept;

}  // namespace cutfuse::conv::shift
