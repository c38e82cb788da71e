/// \file
/// A convolution as a unit-stride one over 8-channel groups of a padded grid: what host and kernel
/// agree on. The grid's pixels are numbered row by row ("flat"), so that a filter tap is a
/// distance between pixels, and a tap of eight channels a distance in shared memory.
///
/// A stride (s_h, s_w) becomes s_h * s_w phases of each channel: pixel (y, x) of phase (p, q) is
/// pixel (y s_h + p - pad_h, x s_w + q - pad_w) of the image.
#pragma once

#include <cstdint>

#include "cutfuse/conv.h"

namespace cutfuse::conv::shift {

inline constexpr int32_t kLanes = 8;        // channels of a group: 16 bytes of fp16
inline constexpr int32_t kSlabSteps = 4;    // steps of K = 16 whose weights come together
inline constexpr int32_t kMaxSteps = 1536;  // the kernel's parameters hold the table of steps
inline constexpr int32_t kMaxChunks = 32;
inline constexpr int32_t kRowStepBytes = 32;  // of an output channel, 16 of K, fp16
inline constexpr int32_t kSector = 8;         // floats of a 32-byte sector

// What the kernel's own tables take of shared memory.
inline constexpr int32_t kControlBytes = 2048;  // of sm90/layout.cuh's Control
inline constexpr int32_t kRowBytes = 16;        // of its RowConstants
inline constexpr int32_t kLaneBytes = 12;       // of sm90/source.cuh's Lanes, of each lane-channel
inline constexpr int32_t kSendsOfWarp = 16;     // stores of 16 bytes' description
inline constexpr int32_t kSendBytes = 8 * kSendsOfWarp * 16;  // of all consumers' warps
inline constexpr int32_t kMostAhead = 8;        // batches of a producer's warp on their way
inline constexpr int32_t kMaxPieces = 8;        // of x on their way
inline constexpr int32_t kPieceGuard = 16;      // bytes of zeros after a piece
inline constexpr int32_t kRawItemBytes = 1024;  // of 32 pixels of eight lane-channels of x

/// Threads that read and convert: two warpgroups, unless the others' accumulators leave them too
/// few registers.
constexpr int32_t producers(int32_t tile_n, int32_t planes) {
  return tile_n * planes >= 256 ? 128 : 256;
}
/// Whether a kernel at ieee promotes parts of its tile one after the other, for which all weights
/// must stay in shared memory.
constexpr bool in_parts(int32_t tile_n, int32_t planes) { return tile_n * planes > 256; }
/// Whether a kernel finds a block's steps by where it begins in a ring of rows. Those of more
/// pixels would take 2 % more time for it, in parts 8 %, ring or not (H200).
constexpr bool takes_rings(int32_t tile_n) { return tile_n <= 128; }
/// Whether a kernel has the registers to change the patch's scale between chunks of channels.
constexpr bool takes_chunks(int32_t tile_n) { return tile_n <= 128; }

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int32_t round_up(int64_t a, int32_t b) {
  return static_cast<int32_t>(ceil_div(a, b) * b);
}

/// n / divisor for 0 <= n < 2^31 by a multiplication.
struct Divisor {
  uint32_t divisor = 1;
  uint32_t multiplier = 0;  // 0: by one
  uint32_t shift = 0;

  Divisor() = default;
  explicit Divisor(int32_t d) : divisor(static_cast<uint32_t>(d)) {
    if (d <= 1) return;
    uint32_t log = 0;
    while ((uint64_t(1) << log) < divisor) ++log;
    multiplier = static_cast<uint32_t>(((uint64_t(1) << (31 + log)) / divisor) + 1);
    shift = log - 1;
  }
#ifdef __CUDACC__
  __device__ __forceinline__ int32_t divide(int32_t n) const {
    return multiplier == 0
               ? n
               : static_cast<int32_t>(__umulhi(static_cast<uint32_t>(n), multiplier) >> shift);
  }
#endif
};

/// How results become images: a transposed convolution of stride (up_h, up_w) is a unit-stride one
/// whose output channels are the phases of each channel made, those of a row next to each other.
/// Its result (y, x) of phase (a, b) is pixel (y up_h + a - crop_h, x up_w + b - crop_w) made.
struct Interleave {
  int32_t up_h = 1, up_w = 1;
  int32_t crop_h = 0, crop_w = 0;
  int32_t height = 0, width = 0;       // of the images made
  int32_t kernel_h = 0, kernel_w = 0;  // of the whole filter

  constexpr int32_t phases() const { return up_h * up_w; }
  /// Taps of the phase that has fewest, but none, at an edge of the image where there are phases.
  constexpr int64_t fewest_taps() const {
    const int64_t h = kernel_h / up_h, w = kernel_w / up_w;
    return phases() == 1 ? h * w : (h > 1 ? h / 2 : 1) * (w > 1 ? w / 2 : 1);
  }
};

struct Geometry {
  Interleave made;
  // The convolution; channels are those of one group.
  int32_t batch, groups, channels, height, width, out_channels, out_height, out_width;
  int32_t kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  // Phases, and channels with their phases in groups of eight.
  int32_t phases_h, phases_w;
  int32_t phase_channels;  // channels of a phase, padded to eight; 0: phases lie next to each other
  bool rows_first;         // then: all channels of a row of phases, else all phases of a channel
  int32_t lane_groups;     // in all
  int32_t chunk_groups, chunks;
  // The grid.
  int32_t reach_rows, reach_columns;  // of the taps
  int32_t strip;                      // output columns; 0: whole rows
  int32_t strips;
  int32_t pitch;          // pixels from one row to the next
  int32_t block_outputs;  // results that a block of tile_n pixels stores, up to alignment
  int32_t blocks;         // of a strip
  int32_t tile_blocks;    // pixel blocks of a tile
  int32_t tiles;          // of a strip
  int32_t patch;          // pixels that a tile reads; of a strip, whole rows of them
  // Output channels.
  int32_t m_blocks, warp_channels, m_tiles;
  int32_t stack;        // rows of results, below each other, that the weights' tile makes at once
  int32_t row_warps;    // binary logarithm of the warps that make one of them
  int32_t weight_rows;  // of an m tile: 16 of each warp that has channels
  // Shared memory, and how the producers' warps divide their work.
  int32_t stages;
  int32_t ring_rows;    // that patches one below the other share; 0: each has its own pixels
  int32_t together;     // groups of a pixel that a warp takes together: 1 or 2
  int32_t raw_depth;    // batches of each warp on their way
  int32_t group_warps;  // that share a pixel's groups
  // Pieces of x that the copy engine brings: some rows of the grid, one if there are strides, with
  // all phases of some channels.
  int32_t early;       // columns of x in a piece before its row of the grid
  int32_t piece_rows;  // 0: it cannot
  int32_t piece_channels, piece_bytes;
  int32_t pieces;     // in shared memory
  int32_t slabs;      // of the weight of one (group, m tile)
  int32_t slab_ring;  // slabs in shared memory; >= slabs: they stay
};

/// Channel, row and column phase of lane-channel `q`; channel >= channels: padding.
struct LaneChannel {
  int32_t channel, phase_h, phase_w;
};

constexpr LaneChannel lane_channel(const Geometry& g, int32_t q) {
  if (g.phase_channels == 0 && g.rows_first) {
    const int32_t of_row = g.channels * g.phases_w;
    const int32_t row = q / of_row, at = q % of_row;
    return {row < g.phases_h ? at / g.phases_w : g.channels, row, at % g.phases_w};
  }
  const int32_t phases = g.phases_h * g.phases_w;
  const int32_t phase = g.phase_channels != 0 ? q / g.phase_channels : q % phases;
  const int32_t channel = g.phase_channels != 0 ? q % g.phase_channels : q / phases;
  return {channel, phase / g.phases_w, phase % g.phases_w};
}

/// Whether all weights of a (group, m tile) stay in shared memory; else they come through a ring.
constexpr bool weights_stay(const Geometry& g) { return g.slab_ring >= g.slabs; }

/// Rows of a strip's grid from a tile to the next.
constexpr int32_t tile_rows(const Geometry& g) { return g.tile_blocks * g.stack; }

/// Rows of a ring that a block goes on by where it begins anew: those of a whole patch.
constexpr int32_t patch_rows(const Geometry& g) {
  return tile_rows(g) + round_up(g.reach_rows, g.stack);
}
/// Whether a block that begins anew waits until the patch before has been read: the ring has no
/// rows for both.
constexpr bool runs_empty(const Geometry& g) { return g.ring_rows < g.stages * patch_rows(g); }

/// Groups of lane-channels that a piece has: all where channels are few, else every phase of eight.
constexpr int32_t groups_of_piece(const Geometry& g) {
  return g.phase_channels == 0 ? g.lane_groups : g.phases_h * g.phases_w;
}

/// Row (or column) of the filter that tap `a` of phase `phase` multiplies, or -1.
constexpr int32_t filter_index(int32_t a, int32_t phase, int32_t stride, int32_t dilation,
                               int32_t kernel) {
  const int32_t at = a * stride + phase;
  const int32_t index = at / dilation;
  return at % dilation == 0 && index < kernel ? index : -1;
}

/// One half of a step: eight lane-channels at one tap. group < 0: padding, of zero weight.
struct Half {
  int16_t group;
  uint8_t tap_h, tap_w;
};

/// Output channel, within the group, of row `row` of m tile `m_tile`, or -1: every warp has the
/// same number of channels.
constexpr int32_t channel_of_row(const Geometry& g, int32_t m_tile, int32_t row) {
  const int32_t of_warp = row % 16;
  const int32_t warp = m_tile * g.m_blocks * 4 + (row / 16 & ((1 << g.row_warps) - 1));
  const int32_t channel = warp * g.warp_channels + of_warp;
  return of_warp < g.warp_channels && channel < g.out_channels ? channel : -1;
}

/// Of an output channel: which channel made, and phase.
struct MadeChannel {
  int32_t channel, phase_h, phase_w;
};

constexpr MadeChannel made_channel(const Geometry& g, int32_t channel) {
  const int32_t phase = channel % g.made.phases();
  return {channel / g.made.phases(), phase / g.made.up_w, phase % g.made.up_w};
}

/// Row of the results, below the block's first, that a row of the weights' tile makes.
constexpr int32_t stacked_row(const Geometry& g, int32_t row) { return row / 16 >> g.row_warps; }

}  // namespace cutfuse::conv::shift
