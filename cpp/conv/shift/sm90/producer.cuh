/// \file
/// Reads a tile's patch of x, of any strides, and writes it as fp16 planes of eight channels a
/// pixel. Each patch has a power of two as its scale, taken from the one before and checked
/// against what was written: if the largest magnitude leaves fp16's range, the patch is measured
/// and converted again.
#pragma once

#include <cuda_fp16.h>

#include "conv/shift/sm90/layout.cuh"
#include "device/values.cuh"
#include "program/fold.cuh"

namespace cutfuse::conv::shift::sm90 {

/// Where a lane-channel lies from its pixel of phase (0, 0).
struct LaneOffset {
  uint32_t bytes;
  int16_t row, column;
};

template <int kPlanes, int kProducers>
class Producer {
 public:
  CUTLASS_DEVICE Producer(const Params& params, char* shared)
      : p_(params),
        shared_(shared),
        control_(*reinterpret_cast<Control*>(shared + params.shared.control)),
        thread_(int(threadIdx.x) - kConsumers) {}

  CUTLASS_DEVICE void run() {
    const Geometry& g = p_.g;
    Turn turn;
    int32_t slot = 0;
    bool first_round = true;
    for (Schedule schedule(p_); schedule.more(); schedule.next()) {
      const Tile tile = decode(p_, schedule.index());
      for (int32_t chunk = 0; chunk < g.chunks; ++chunk) {
        if (!first_round) Barrier::wait(&control_.empty[turn.stage], turn.phase ^ 1);
        fill(tile, chunk, turn.stage, slot, schedule.follows());
        turn.next(g.stages);
        if (turn.stage == 0) first_round = false;
        slot = slot == 2 ? 0 : slot + 1;
      }
    }
  }

 private:
  static constexpr int kItems = 6;  // groups of eight loads on their way at once

  const Params& p_;
  char* shared_;
  Control& control_;
  int thread_;
  int32_t exponent_ = 13;  // good for magnitudes up to 4
  int32_t previous_ = 0;   // first pixel of the patch before

  /// A pixel of a patch in one image of x: where, and whether it and its phases are inside.
  struct Source {
    uint32_t bytes;
    int32_t row, column;
    uint32_t phases;  // a bit for each phase that is inside, if there are at most 32
  };

  /// Whether the largest magnitude written is below infinity and above what keeps small values
  /// apart from zero.
  CUTLASS_DEVICE bool fits(float largest) const {
    constexpr float kLowest = kPlanes == 2 ? 256.f : 16.f;
    return largest < INFINITY && (largest >= kLowest || exponent_ >= 126);
  }

  /// `follows`: the tile before, in the stage before, is the one above in the same strip, so that
  /// where patches overlap the planes are copied.
  CUTLASS_DEVICE void fill(const Tile& tile, int32_t chunk, int32_t stage, int32_t slot,
                           bool follows) {
    const bool native = p_.dtype != DType::kFloat32;
    if (native) exponent_ = 0;
    const Block first = make_block(p_, tile, tile.first);
    int32_t begin = 0;
    if (follows && p_.g.chunks == 1) {
      const int32_t advance = first.flat - previous_;
      begin = max(p_.g.patch - advance, 0);
      copy(stage, advance, begin);
    }
    previous_ = first.flat;
    for (bool again = false;; again = true) {
      const float largest = share(convert(tile, first, chunk, stage, begin), slot, again);
      if (native || again || fits(largest)) break;
      named_sync();
      const float magnitude = share(measure(tile, first, chunk), slot, true);
      if (magnitude == 0.f) break;
      exponent_ = min(13 - ilogbf(magnitude), 126);
      begin = 0;  // what was copied has the old scale
      named_sync();
    }
    if (thread_ == 0) {
      control_.exponent[stage] = exponent_;
      Barrier::arrive(&control_.full[stage]);
    }
  }

  /// The first `count` pixels, from the stage before where they are `advance` further on.
  CUTLASS_DEVICE void copy(int32_t stage, int32_t advance, int32_t count) const {
    const int32_t before = stage == 0 ? p_.g.stages - 1 : stage - 1;
    char* patches = shared_ + p_.shared.patch;
    for (int32_t block = 0; block < kPlanes * p_.g.chunk_groups; ++block) {
      const int32_t at = block * p_.shared.group_bytes;
      const auto* from = reinterpret_cast<const uint4*>(patches + before * p_.shared.stage_bytes +
                                                        at + advance * 16);
      auto* to = reinterpret_cast<uint4*>(patches + stage * p_.shared.stage_bytes + at);
#pragma unroll 4
      for (int32_t i = thread_; i < count; i += kProducers) to[i] = from[i];
    }
  }

  CUTLASS_DEVICE static void named_sync() {
    cutlass::arch::NamedBarrier::sync(kProducers, kProducerBarrier);
  }

  /// Waits for all threads. The largest of their values, which are not negative. Slots are taken in
  /// turn, so that one is cleared while nobody reads it.
  CUTLASS_DEVICE float share(float largest, int slot, bool again) {
    if (again) {
      if (thread_ == 0) control_.largest[slot] = 0;
      named_sync();
    }
    const uint32_t of_warp = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
    if (thread_ % 32 == 0) atomicMax(&control_.largest[slot], of_warp);
    if (thread_ == 0) control_.largest[slot == 2 ? 0 : slot + 1] = 0;
    cutlass::arch::fence_view_async_shared();  // what was stored is for wgmma
    named_sync();
    return __uint_as_float(*reinterpret_cast<volatile uint32_t*>(&control_.largest[slot]));
  }

  CUTLASS_DEVICE const char* image_of(const Tile& tile) const {
    const int64_t offset =
        tile.image * p_.x_image + int64_t(tile.group) * p_.g.channels * p_.x_channel;
    return static_cast<const char*>(p_.x) + offset * size_of(p_.dtype);
  }

  CUTLASS_DEVICE Source locate(const Tile& tile, int32_t flat) const {
    const Geometry& g = p_.g;
    const int32_t grid_row = p_.pitch.divide(flat);
    const int32_t grid_column = flat - grid_row * g.pitch + tile.strip * g.strip;
    Source source;
    source.row = grid_row * g.stride_h - g.pad_h;
    source.column = grid_column * g.stride_w - g.pad_w;
    source.bytes = uint32_t(source.row) * p_.row_bytes + uint32_t(source.column) * p_.column_bytes;
    source.phases =
        uint32_t(source.row) < uint32_t(g.height) && uint32_t(source.column) < uint32_t(g.width);
    if (p_.phase_masks) {
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

  /// Converts the patch from pixel `begin` on with exponent_; returns the largest magnitude this
  /// thread wrote.
  CUTLASS_DEVICE float convert(const Tile& tile, const Block& first, int32_t chunk, int32_t stage,
                               int32_t begin) {
    const Geometry& g = p_.g;
    const int32_t first_group = chunk * g.chunk_groups;
    const int32_t groups = min(g.chunk_groups, g.lane_groups - first_group);
    const float scale = power_of_two(exponent_);
    const char* image = image_of(tile);
    char* patch = shared_ + p_.shared.patch + stage * p_.shared.stage_bytes;
    __half2 largest = __float2half2_rn(0.f);
    // A warp takes 32 pixels at a time, all their groups.
    int32_t pixel = begin + thread_;
    int32_t group = 0;
    Source source = locate(tile, first.flat + pixel);
    while (pixel - thread_ % 32 < g.patch) {
      float v[kItems][kLanes];
      int32_t at[kItems];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kItems; ++i) {
        const bool mine = pixel < g.patch;
        at[i] = mine ? group * p_.shared.group_bytes + pixel * 16 : -1;
        load(image, source, (first_group + group) * kLanes, mine, v[i]);
        if (p_.ahead_rows > 0) prefetch(image, source, (first_group + group) * kLanes, mine);
        if (++group == groups) {
          group = 0;
          pixel += kProducers;
          source = locate(tile, first.flat + pixel);
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kItems; ++i) {
        if (at[i] >= 0) store(v[i], scale, patch + at[i], largest);
      }
    }
    return fmaxf(__low2float(largest), __high2float(largest));
  }

  /// The largest finite magnitude of the whole patch that this thread reads.
  CUTLASS_DEVICE float measure(const Tile& tile, const Block& first, int32_t chunk) const {
    const Geometry& g = p_.g;
    const int32_t first_group = chunk * g.chunk_groups;
    const int32_t last_group = min(first_group + g.chunk_groups, g.lane_groups);
    const char* image = image_of(tile);
    float largest = 0.f;
    for (int32_t pixel = thread_; pixel < g.patch; pixel += kProducers) {
      const Source source = locate(tile, first.flat + pixel);
      for (int32_t group = first_group; group < last_group; ++group) {
        float v[kLanes];
        load(image, source, group * kLanes, true, v);
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < kLanes; ++c) {
          const float magnitude = fabsf(v[c]);
          if (magnitude < INFINITY) largest = fmaxf(largest, magnitude);
        }
      }
    }
    return largest;
  }

  CUTLASS_DEVICE static float read(const char* image, uint32_t bytes) {
    return __ldg(reinterpret_cast<const float*>(image + bytes));
  }

  /// What the next tile reads below these pixels comes to L2 meanwhile. With many channels it costs
  /// more than it gains (H200: 8 channels -20 % of time, 32 channels +20 %).
  CUTLASS_DEVICE void prefetch(const char* image, const Source& source, int32_t first,
                               bool mine) const {
    const bool ends = thread_ % 32 == 0 || thread_ % 32 == 31;  // of 128 bytes
    if (!mine || !ends || source.phases == 0 || source.row + p_.ahead_rows >= p_.g.height) return;
    const uint32_t bytes = source.bytes + p_.ahead_rows * p_.row_bytes + first * p_.channel_bytes;
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < kLanes; ++c) {
      if (first + c < p_.g.channels) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(image + (bytes + c * p_.channel_bytes)));
      }
    }
  }

  CUTLASS_DEVICE void load(const char* image, const Source& source, int32_t first, bool mine,
                           float (&v)[kLanes]) const {
    const Geometry& g = p_.g;
    if (p_.one_phase) {
      const uint32_t bytes = source.bytes + uint32_t(first) * p_.channel_bytes;
      const bool inside = mine && source.phases != 0;
      if (first + kLanes <= g.channels) {
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < kLanes; ++c) {
          v[c] = inside ? read(image, bytes + c * p_.channel_bytes) : 0.f;
        }
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < kLanes; ++c) {
          v[c] = inside && first + c < g.channels ? read(image, bytes + c * p_.channel_bytes) : 0.f;
        }
      }
      return;
    }
    const auto* lanes = reinterpret_cast<const LaneOffset*>(shared_ + p_.shared.lanes) + first;
    if (p_.lanes_are_channels) {  // of one phase each
      const LaneOffset lane = lanes[0];
      const uint32_t bytes = source.bytes + lane.bytes;
      const bool inside = mine && uint32_t(source.row + lane.row) < uint32_t(g.height) &&
                          uint32_t(source.column + lane.column) < uint32_t(g.width);
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kLanes; ++c) {
        v[c] = inside && lanes[c].row >= 0 ? read(image, bytes + c * p_.channel_bytes) : 0.f;
      }
      return;
    }
    if (p_.phase_masks) {
      const uint32_t inside = mine ? source.phases >> (first & p_.last_phase) : 0;
      if (p_.lane_pairs) {
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < kLanes; c += 2) {
          float2 pair{0.f, 0.f};
          if ((inside >> c & 1) != 0 && lanes[c].row >= 0) {
            pair = __ldg(reinterpret_cast<const float2*>(image + (source.bytes + lanes[c].bytes)));
          }
          v[c] = pair.x;
          v[c + 1] = pair.y;
        }
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < kLanes; ++c) {
          const bool exists = (inside >> c & 1) != 0 && lanes[c].row >= 0;
          v[c] = exists ? read(image, source.bytes + lanes[c].bytes) : 0.f;
        }
      }
      return;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < kLanes; ++c) {
      const LaneOffset lane = lanes[c];
      const bool inside = mine && uint32_t(source.row + lane.row) < uint32_t(g.height) &&
                          uint32_t(source.column + lane.column) < uint32_t(g.width);
      v[c] = inside ? read(image, source.bytes + lane.bytes) : 0.f;
    }
  }

  CUTLASS_DEVICE void store(const float (&v)[kLanes], float scale, char* to,
                            __half2& largest) const {
    uint32_t high[kLanes / 2];
    uint32_t low[kLanes / 2];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLanes / 2; ++i) {
      const float a = v[2 * i] * scale;
      const float b = v[2 * i + 1] * scale;
      const __half2 pair = __floats2half2_rn(a, b);
      high[i] = *reinterpret_cast<const uint32_t*>(&pair);
      largest = __hmax2(largest, __habs2(pair));
      if constexpr (kPlanes == 2) {
        const float2 rounded = __half22float2(pair);
        const __half2 rest = __floats2half2_rn(a - rounded.x, b - rounded.y);
        low[i] = *reinterpret_cast<const uint32_t*>(&rest);
      }
    }
    *reinterpret_cast<uint4*>(to) = {high[0], high[1], high[2], high[3]};
    if constexpr (kPlanes == 2) {
      *reinterpret_cast<uint4*>(to + p_.shared.plane_bytes) = {low[0], low[1], low[2], low[3]};
    }
  }
};

}  // namespace cutfuse::conv::shift::sm90
