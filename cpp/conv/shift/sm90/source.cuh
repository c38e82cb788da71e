/// \file
/// Where a patch's values lie in x, of any strides.
#pragma once

#include "conv/shift/sm90/layout.cuh"

namespace cutfuse::conv::shift::sm90 {

/// Of eight channels of a pixel in a piece of channels_last.
inline constexpr int32_t kLastPixelBytes = kLanes * sizeof(float);

/// Where a lane-channel lies from its pixel of phase (0, 0): [lane-channel] each.
class Lanes {
 public:
  struct Phase {
    int16_t row, column;  // row < 0: the lane-channel is padding
  };

  CUTLASS_DEVICE Lanes(const Params& p, char* shared)
      : bytes_(reinterpret_cast<uint32_t*>(shared + p.shared.lanes)),
        phases_(reinterpret_cast<Phase*>(bytes_ + p.g.lane_groups * kLanes)),
        in_piece_(reinterpret_cast<int32_t*>(phases_ + p.g.lane_groups * kLanes)) {}

  /// Fills the tables; all threads of the block.
  CUTLASS_DEVICE void prepare(const Params& p) {
    for (int q = threadIdx.x; q < p.g.lane_groups * kLanes; q += blockDim.x) {
      const LaneChannel lane = lane_channel(p.g, q);
      bytes_[q] = uint32_t(lane.channel) * p.channel_bytes + uint32_t(lane.phase_h) * p.row_bytes +
                  uint32_t(lane.phase_w) * p.column_bytes;
      phases_[q] = {int16_t(lane.channel < p.g.channels ? lane.phase_h : INT16_MIN),
                    int16_t(lane.phase_w)};
      in_piece_[q] = place_in_piece(p, q);
    }
  }
  CUTLASS_DEVICE uint32_t bytes(int32_t q) const { return bytes_[q]; }
  CUTLASS_DEVICE Phase phase(int32_t q) const { return phases_[q]; }
  /// Of eight, from a multiple of eight on.
  CUTLASS_DEVICE void bytes(int32_t first, uint32_t (&of)[kLanes]) const {
    const auto* from = reinterpret_cast<const uint4*>(bytes_ + first);
    *reinterpret_cast<uint4*>(&of[0]) = from[0];
    *reinterpret_cast<uint4*>(&of[4]) = from[1];
  }
  /// In a piece of x; of one, or of eight.
  CUTLASS_DEVICE int32_t in_piece(int32_t q) const { return in_piece_[q]; }
  CUTLASS_DEVICE void in_piece(int32_t first, int32_t (&of)[kLanes]) const {
    const auto* from = reinterpret_cast<const int4*>(in_piece_ + first);
    *reinterpret_cast<int4*>(&of[0]) = from[0];
    *reinterpret_cast<int4*>(&of[4]) = from[1];
  }

 private:
  uint32_t* bytes_;
  Phase* phases_;
  int32_t* in_piece_;

  /// Bytes from a pixel's phase (0, 0) to lane-channel `q` of those that a piece has. One without a
  /// channel has zero weights: it reads another's.
  CUTLASS_DEVICE static int32_t place_in_piece(const Params& p, int32_t q) {
    const Geometry& g = p.g;
    LaneChannel lane = lane_channel(g, q);
    if (g.phase_channels != 0) {
      const int32_t phase = q / kLanes;
      lane = {q % kLanes, phase / g.phases_w, phase % g.phases_w};
    }
    if (lane.channel >= g.piece_channels) return 0;
    if (p.channels_together) {
      return (lane.phase_h * g.pitch * g.stride_w + lane.phase_w) * kLastPixelBytes;
    }
    const int32_t row = lane.channel * g.piece_rows * g.phases_h + lane.phase_h;
    return (row * g.pitch * g.stride_w + lane.phase_w) * 4;
  }
};

/// A pixel of a patch in one image of x: where, and whether it and its phases are inside.
struct Source {
  uint32_t bytes;
  int32_t row, column;
  uint32_t phases;  // a bit for each phase that is inside, if there are at most 32

  CUTLASS_DEVICE bool inside(const Params& p, Lanes::Phase phase) const {
    return phase.row >= 0 && uint32_t(row + phase.row) < uint32_t(p.g.height) &&
           uint32_t(column + phase.column) < uint32_t(p.g.width);
  }
};

CUTLASS_DEVICE Source locate(const Params& p, int32_t strip, int32_t flat) {
  const Geometry& g = p.g;
  const int32_t grid_row = p.pitch.divide(flat);
  const int32_t grid_column = flat - grid_row * g.pitch + strip * g.strip;
  Source source;
  source.row = grid_row * g.stride_h - g.pad_h;
  source.column = grid_column * g.stride_w - g.pad_w;
  source.bytes = uint32_t(source.row) * p.row_bytes + uint32_t(source.column) * p.column_bytes;
  source.phases =
      uint32_t(source.row) < uint32_t(g.height) && uint32_t(source.column) < uint32_t(g.width);
  if (p.phase_masks) {
    source.phases = 0;
    for (int32_t row = g.phases_h - 1; row >= 0; --row) {
      const bool inside = uint32_t(source.row + row) < uint32_t(g.height);
      for (int32_t column = g.phases_w - 1; column >= 0; --column) {
        const bool both = inside && uint32_t(source.column + column) < uint32_t(g.width);
        source.phases = source.phases << 1 | uint32_t(both);
      }
    }
    // Lanes of a group are phases 0 ... 7, or fewer over and over.
    for (int32_t count = g.phases_h * g.phases_w; count < kLanes; count *= 2) {
      source.phases |= source.phases << count;
    }
  }
  return source;
}

/// Eight lane-channels of a pixel.
struct Item {
  float v[kLanes];
  int32_t pixel, group;  // of the patch, and of its chunk
  bool exists;
};

CUTLASS_DEVICE const char* image_of(const Params& p, const Tile& tile) {
  const int32_t group = p.m_tiles.divide(tile.outer);
  const int64_t offset = tile.image * p.x_image + int64_t(group) * p.g.channels * p.x_channel;
  return static_cast<const char*>(p.x) + offset * size_of(p.dtype);
}

/// The patches of this block in order: tiles, and their chunks of channels.
class Patches {
 public:
  CUTLASS_DEVICE explicit Patches(const Params& p) : schedule_(p) { enter(p); }

  CUTLASS_DEVICE bool more(const Params& p) const { return schedule_.more(p); }
  CUTLASS_DEVICE void next(const Params& p) {
    if (++chunk == p.g.chunks) {
      chunk = 0;
      schedule_.next(p);
      enter(p);
    }
  }
  CUTLASS_DEVICE int32_t first_group(const Params& p) const { return chunk * p.g.chunk_groups; }
  CUTLASS_DEVICE int32_t groups(const Params& p) const {
    return min(p.g.chunk_groups, p.g.lane_groups - first_group(p));
  }

  Tile tile;
  int32_t chunk = 0;
  int32_t flat = 0;     // the patch's first pixel in its strip's grid
  int32_t advance = 0;  // pixels from the patch before, where that overlaps
  int32_t begin = 0;    // pixels that the patch before has

 private:
  Schedule schedule_;

  CUTLASS_DEVICE void enter(const Params& p) {
    if (!more(p)) return;
    tile = schedule_.tile(p);
    const int32_t before = flat;
    flat = first_pixel(p, tile.first);
    // The tile before, in the stage before, may be the one above in the same strip.
    const bool follows = schedule_.continues() && tile.first != 0 && p.g.chunks == 1;
    advance = flat - before;
    begin = follows ? max(p.g.patch - advance, 0) : 0;
  }
};

}  // namespace cutfuse::conv::shift::sm90
