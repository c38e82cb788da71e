/// \file
/// Where a patch's values lie in x, of any strides, and how a producer's warp has them brought to
/// shared memory: in items of 32 pixels of eight lane-channels, several on their way at once.
#pragma once

#include "conv/shift/sm90/layout.cuh"
#include "device/values.cuh"

namespace cutfuse::conv::shift::sm90 {

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
      in_piece_[q] = place_in_piece(p.g, q);
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
  /// Of eight, in a piece of x.
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
  CUTLASS_DEVICE static int32_t place_in_piece(const Geometry& g, int32_t q) {
    LaneChannel lane = lane_channel(g, q);
    if (g.phase_channels != 0) {
      const int32_t phase = q / kLanes;
      lane = {q % kLanes, phase / g.phases_w, phase % g.phases_w};
    }
    if (lane.channel >= g.piece_channels) return 0;
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
    tile = decode(p, schedule_.index());
    const int32_t before = flat;
    flat = first_pixel(p, tile.first);
    // The tile before, in the stage before, may be the one above in the same strip.
    const bool follows = schedule_.continues() && tile.first != 0 && p.g.chunks == 1;
    advance = flat - before;
    begin = follows ? max(p.g.patch - advance, 0) : 0;
  }
};

/// Which items of a patch a producer's warp takes: some of the pixels, some of the groups.
struct Share {
  int32_t warp, lane;
  int32_t pixel, pixel_stride;  // this lane's first
  int32_t group;                // first; they are Geometry::group_warps apart

  CUTLASS_DEVICE Share(const Params& p, int thread, int warps)
      : warp(thread / 32), lane(thread % 32) {
    const int32_t pixel_warps = warps / p.g.group_warps;
    pixel_stride = pixel_warps * 32;
    pixel = warp % pixel_warps * 32 + lane;
    group = warp / pixel_warps;
  }
};

/// Has the items of one producer's warp brought to shared memory, in the order in which it will
/// take them. A lane reads what it has had brought itself.
class Reader {
 public:
  CUTLASS_DEVICE Reader(const Params& params, char* shared, const Share& share)
      : p_(params), lanes_(params, shared), patches_(params), share_(share) {
    const int32_t room = params.g.raw_depth * params.g.together * kRawItemBytes;
    raw_ = shared_address(shared) + params.shared.raw + share.warp * room +
           share.lane * (params.lane_pairs ? 8 : 4);
    enter();
  }

  /// Before the first take(): as many batches as there is room for.
  template <int kBatch>
  CUTLASS_DEVICE void start() {
#pragma unroll 1
    for (int i = 0; i < p_.g.raw_depth; ++i) issue<kBatch>();
  }

  /// The values of the oldest batch of items; issue() brings another in its place.
  template <int kBatch>
  CUTLASS_DEVICE void take(float (&v)[kBatch][kLanes]) const {
    wait_but(p_.g.raw_depth - 1);
    const uint32_t from = raw_ + slot_ * (kBatch * kRawItemBytes);
    if (p_.lane_pairs) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < kLanes; c += 2) {
          asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                       : "=f"(v[i][c]), "=f"(v[i][c + 1])
                       : "r"(from + i * kRawItemBytes + c * 128));
        }
      }
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < kLanes; ++c) {
          asm volatile("ld.shared.f32 %0, [%1];"
                       : "=f"(v[i][c])
                       : "r"(from + i * kRawItemBytes + c * 128));
        }
      }
    }
  }

  template <int kBatch>
  CUTLASS_DEVICE void issue() {
    if (patches_.more(p_)) {
      const int32_t groups = patches_.groups(p_);
      const uint32_t to = raw_ + slot_ * (kBatch * kRawItemBytes);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        const int32_t group = group_ + i * p_.g.group_warps;
        copy(to + i * kRawItemBytes, (patches_.first_group(p_) + group) * kLanes,
             pixel_ < p_.g.patch && group < groups);
      }
      group_ += kBatch * p_.g.group_warps;
      if (group_ >= groups) {
        group_ = share_.group;
        pixel_ += share_.pixel_stride;
        if (pixel_ - share_.lane < p_.g.patch) {
          source_ = locate(p_, patches_.tile.strip, patches_.flat + pixel_);
        } else {
          patches_.next(p_);
          enter();
        }
      }
    }
    cute::cp_async_fence();
    slot_ = slot_ + 1 == p_.g.raw_depth ? 0 : slot_ + 1;
  }

 private:
  const Params& p_;
  Lanes lanes_;
  Patches patches_;
  Share share_;
  const char* image_;
  Source source_;
  int32_t pixel_;
  int32_t group_;
  int32_t slot_ = 0;
  uint32_t raw_;

  /// Waits until no more than so many batches are on their way.
  CUTLASS_DEVICE static void wait_but(int32_t batches) {
    static_assert(kMostAhead == 8);
    if (batches == 7) {
      cute::cp_async_wait<7>();
    } else if (batches >= 3) {
      cute::cp_async_wait<3>();
    } else if (batches == 2) {
      cute::cp_async_wait<2>();
    } else if (batches == 1) {
      cute::cp_async_wait<1>();
    } else {
      cute::cp_async_wait<0>();
    }
  }

  /// Goes on to the next patch of which the warp has an item.
  CUTLASS_DEVICE void enter() {
    group_ = share_.group;
    for (; patches_.more(p_); patches_.next(p_)) {
      pixel_ = patches_.begin + share_.pixel;
      if (pixel_ - share_.lane < p_.g.patch && group_ < patches_.groups(p_)) {
        image_ = image_of(p_, patches_.tile);
        source_ = locate(p_, patches_.tile.strip, patches_.flat + pixel_);
        return;
      }
    }
  }

  /// kBytes from x, or zeros.
  template <int kBytes>
  CUTLASS_DEVICE static void bring(uint32_t to, const char* from, bool exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes),
                 "r"(exists ? kBytes : 0)
                 : "memory");
  }

  /// The lane-channels from `first` on of this lane's pixel.
  CUTLASS_DEVICE void copy(uint32_t to, int32_t first, bool mine) const {
    const Geometry& g = p_.g;
    if (p_.one_phase) {
      const uint32_t bytes = source_.bytes + uint32_t(first) * p_.channel_bytes;
      const bool inside = mine && source_.phases != 0;
      const int32_t channels = g.channels - first;
      const char* from = image_ + bytes;
      if (channels >= kLanes) {
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < kLanes; ++c, from += p_.channel_bytes) {
          bring<4>(to + c * 128, from, inside);
        }
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < kLanes; ++c, from += p_.channel_bytes) {
          bring<4>(to + c * 128, from, inside && c < channels);
        }
      }
      return;
    }
    if (p_.lanes_are_channels) {  // of one phase each
      const uint32_t bytes = source_.bytes + lanes_.bytes(first);
      const bool inside = mine && source_.inside(p_, lanes_.phase(first));
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kLanes; ++c) {
        bring<4>(to + c * 128, image_ + (bytes + c * p_.channel_bytes),
                 inside && lanes_.phase(first + c).row >= 0);
      }
      return;
    }
    uint32_t bytes[kLanes];
    lanes_.bytes(first, bytes);
    uint32_t inside = 0;
    if (p_.phase_masks) {
      const int32_t lanes = g.channels * g.phases_h * g.phases_w - first;
      inside =
          source_.phases >> (first & p_.last_phase) & (lanes < kLanes ? (1u << lanes) - 1 : 0xffu);
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kLanes; ++c) {
        inside |= uint32_t(source_.inside(p_, lanes_.phase(first + c))) << c;
      }
    }
    if (!mine) inside = 0;
    if (p_.lane_pairs) {
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kLanes; c += 2) {
        bring<8>(to + c * 128, image_ + (source_.bytes + bytes[c]), (inside >> c & 1) != 0);
      }
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kLanes; ++c) {
        bring<4>(to + c * 128, image_ + (source_.bytes + bytes[c]), (inside >> c & 1) != 0);
      }
    }
  }
};

}  // namespace cutfuse::conv::shift::sm90
