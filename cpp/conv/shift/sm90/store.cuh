/// \file
/// Stores a block's results through shared memory: runs of whole sectors by bulk stores, or
/// interleaved or 16-bit pixels.
#pragma once

#include "conv/shift/sm90/pixels.cuh"
#include "device/values.cuh"

namespace cutfuse::conv::shift::sm90 {

/// kRuns: fp32 results that follow each other do so in memory, whatever Params::in_runs says.
template <int kN, bool kRuns>
class Store {
 public:
  static constexpr int kValues = kN / 2;
  using Coordinates = PlaneCoordinates<kN>;
  /// Floats of a staged row; 8 modulo 32 or 16: few conflicts.
  static constexpr int kPitch = kN + kSector;

  CUTLASS_DEVICE Store(const Params& params, char* shared)
      : p_(params), shared_(shared), lane_(int(threadIdx.x) % 32) {
    const int warpgroup = int(threadIdx.x) / 128;
    const int before =
        params.g.m_blocks == 2 ? warpgroup * 4 : warpgroup * params.g.weight_rows / 16;
    const int warp = int(threadIdx.x) / 32 % 4;
    const int of_warp = params.shared.staging_boxes * 8 * kPitch;
    of_warpgroup_ = reinterpret_cast<float*>(shared + params.shared.staging) + before * of_warp;
    staging_ = of_warpgroup_ + warp * of_warp;
  }

  /// The staging areas of all the warpgroup's warps.
  CUTLASS_DEVICE float* of_warpgroup() const { return of_warpgroup_; }

  /// The warp's staging area, once nothing that it holds is still to be stored: room for kValues /
  /// 2 values of each lane. After prepare(), if that comes.
  CUTLASS_DEVICE float* scratch() const {
    cute::tma_store_wait<0>();
    __syncwarp();
    return staging_;
  }

  /// Before run<true>(), while the block's products are on their way: all that needs no values.
  CUTLASS_DEVICE void prepare(const Coordinates& at, const TileOf& tile) {
    run_ = run_of(at, tile);
    const bool whole = at.block.column + kN <= at.block.columns;
    if (!p_.pairs || !whole) pairs_ = pairs_of(at.block);
  }

  /// Through shared memory to bulk stores of whole sectors, of 16 channels or twice eight.
  /// kPrepared: prepare() came before. Of kRuns, the last ones are left to send_rest().
  template <bool kPrepared>
  CUTLASS_DEVICE void run(const float (&v)[kValues], const Coordinates& at, const TileOf& tile) {
    if constexpr (!kPrepared) run_ = run_of(at, tile);
    if (p_.g.warp_channels <= 8) {
      store_rows<0, 1, kPrepared>(v, at, tile);
    } else if (p_.shared.staging_boxes == 2) {
      store_rows<0, 2, kPrepared>(v, at, tile);
    } else {
      store_rows<0, 1, kPrepared>(v, at, tile);
      send_rest<kPrepared>();
      store_rows<1, 1, kPrepared>(v, at, tile);
    }
  }

  /// Sends what run() has left, if anything.
  template <bool kPrepared>
  CUTLASS_DEVICE void send_rest() {
    if constexpr (kPrepared) {
      if (left_ == 0) return;
      post(first_left_, left_);
      left_ = 0;
      issue(posted_);
    } else {
      if (sent_ != posted_) issue(posted_);
    }
  }
  /// Sends four rows of it. After run<false>().
  CUTLASS_DEVICE void send_some() {
    if (sent_ != posted_) issue(min(sent_ + 4, posted_));
  }

  CUTLASS_DEVICE void finish() { cute::tma_store_wait<0>(); }

 private:
  /// What this lane sends: of row `lane` of the warp's 16, from `begin` to `end` of its staged row,
  /// whole sectors from `middle` to `after`.
  struct Run {
    float* to;  // where the staged row begins
    int32_t begin, middle, after, end;
    bool exists;
  };

  /// Of a thread's pairs of pixels, bit j is pair j.
  struct Pairs {
    uint32_t first = 0, second = 0;  // whether the pixel is a result
    uint32_t wraps = 0;              // whether the pair is the first one of a row of the grid
  };

  const Params& p_;
  char* shared_;
  int lane_;
  float* of_warpgroup_;
  float* staging_;
  Run run_;
  Pairs pairs_;
  // Rows of the warp's 16: staged and not yet posted; posted, and of them on their way.
  int32_t first_left_ = 0, left_ = 0;
  int32_t posted_ = 0, sent_ = 0;
  bool even_ = false;  // those posted are sent four at a time

  CUTLASS_DEVICE bool in_runs() const { return kRuns || p_.in_runs; }

  /// First and past-the-last result of the block's run that this block stores for a row whose
  /// sectors begin `phase` floats before its first result; others have their own alone.
  CUTLASS_DEVICE void window(const Block& block, int32_t phase, int32_t* first,
                             int32_t* last) const {
    const int32_t stride = p_.g.strip != 0 ? p_.g.strip : p_.g.block_outputs;
    const auto to_sector = [&](int32_t at) {
      return !in_runs() ? at : at + ((kSector - ((phase + at) & (kSector - 1))) & (kSector - 1));
    };
    *first = block.starts ? 0 : to_sector(block.lead);
    *last = min(to_sector(block.lead + stride), block.end - block.output);
  }

  CUTLASS_DEVICE int64_t result_index(const Coordinates& at, int32_t channel) const {
    const int64_t all = int64_t(p_.g.out_channels) * p_.g.groups;
    const int64_t plane = int64_t(p_.g.out_height) * p_.g.out_width;
    return (at.image * all + channel) * plane + at.block.output;
  }

  CUTLASS_DEVICE Run run_of(const Coordinates& at, const TileOf& tile) const {
    const int32_t channel = channel_of_row(p_.g, tile.m_tile, tile.row(lane_ % 16));
    const int64_t result = result_index(at, tile.group * p_.g.out_channels + max(channel, 0));
    const int32_t phase = phase_of(result);
    int32_t first, last;
    window(at.block, phase, &first, &last);
    Run run;
    run.exists = channel >= 0;
    run.to = static_cast<float*>(p_.out) + result - phase;
    run.begin = phase + first;
    run.end = phase + last;
    run.middle = min((run.begin + kSector - 1) & ~(kSector - 1), run.end);
    run.after = max(run.end & ~(kSector - 1), run.middle);
    return run;
  }

  /// Rows kFirst ... kFirst + kRows - 1 of the thread.
  template <int kFirst, int kRows, bool kPrepared>
  CUTLASS_DEVICE void store_rows(const float (&v)[kValues], const Coordinates& at,
                                 const TileOf& tile) {
    cute::tma_store_wait<0>();
    __syncwarp();
    if (p_.pairs) {
      if (at.block.column + kN <= at.block.columns) {
        write_boxes<kFirst, kRows, kPrepared, true, true>(v, at);
      } else {
        write_boxes<kFirst, kRows, kPrepared, true, false>(v, at);
      }
    } else {
      write_boxes<kFirst, kRows, kPrepared, false, false>(v, at);
    }
    if (in_runs()) {
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if constexpr (kPrepared) {
        first_left_ = kFirst * 8;
        left_ = kRows * 8;
      } else {
        post(kFirst * 8, kRows * 8);
        if constexpr (!kRuns) issue(posted_);
      }
      return;
    }
    __syncwarp();
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
      const float* box = staging_ + r * 8 * kPitch;
      if (p_.g.made.phases() > 1) {
        send_interleaved(at, tile, kFirst + r, box);
      } else {
        send_narrow(at, tile, kFirst + r, box);
      }
    }
  }

  /// A strided transposed convolution: stores the phases of pixels of the warp's box `box`.
  CUTLASS_DEVICE void send_interleaved(const Coordinates& at, const TileOf& tile, int box,
                                       const float* from) const {
    const Interleave& made = p_.g.made;
    const int64_t plane = int64_t(made.height) * made.width;
    const int32_t planes = p_.phases_made.divide(p_.g.out_channels * p_.g.groups);
    const int64_t step = p_.channels_last ? planes : 1;  // from a pixel to the next
    // Rows that are one row of pixels: those of a channel are next to each other.
    const int32_t together = made.up_w == 2 || made.up_w == 4 || made.up_w == 8 ? made.up_w : 1;
    const int32_t shift = __ffs(together) - 1;
    int32_t first, last;
    window(at.block, 0, &first, &last);
#pragma unroll 1
    for (int row = 0; row < 8; row += together, from += together * kPitch) {
      const int32_t channel = channel_of_row(p_.g, tile.m_tile, tile.row(box * 8 + row));
      if (channel < 0) return;
      const MadeChannel to = made_channel(p_.g, tile.group * p_.g.out_channels + channel);
      const int64_t image = at.image * planes * plane + to.channel * (p_.channels_last ? 1 : plane);
#pragma unroll 4
      for (int32_t i = (first << shift) + lane_; i < last << shift; i += 32) {
        const int32_t of_row = i & (together - 1);
        const int32_t result = at.block.output + (i >> shift);
        const int32_t y = p_.out_width.divide(result);
        const int32_t x = result - y * p_.g.out_width;
        const int32_t down = y * made.up_h + to.phase_h - made.crop_h;
        const int32_t along = x * made.up_w + to.phase_w + of_row - made.crop_w;
        if (uint32_t(down) < uint32_t(made.height) && uint32_t(along) < uint32_t(made.width)) {
          store_value(p_.out, image + (down * made.width + along) * step,
                      from[of_row * kPitch + (i >> shift)], p_.dtype);
        }
      }
    }
  }

  /// 16-bit NCHW: stores the rows of the warp's box `box`, by words where two results are one.
  CUTLASS_DEVICE void send_narrow(const Coordinates& at, const TileOf& tile, int box,
                                  const float* from) const {
    int32_t first, last;
    window(at.block, 0, &first, &last);
    auto* out = static_cast<uint16_t*>(p_.out);
#pragma unroll 1
    for (int row = 0; row < 8; ++row, from += kPitch) {
      const int32_t channel = channel_of_row(p_.g, tile.m_tile, tile.row(box * 8 + row));
      if (channel < 0) return;
      const int64_t to = result_index(at, tile.group * p_.g.out_channels + channel);
      const int32_t odd = int32_t(reinterpret_cast<uintptr_t>(out + to + first) / 2 % 2);
#pragma unroll 4
      for (int32_t i = first - odd + 2 * lane_; i < last; i += 64) {
        if (i >= first && i + 1 < last) {
          *reinterpret_cast<uint32_t*>(out + to + i) = pack_pair(from[i], from[i + 1], p_.dtype);
        } else {
          const int32_t one = max(i, first);
          store_value(out, to + one, from[one], p_.dtype);
        }
      }
    }
  }

  /// Each lane looks at a pair of each of the four lanes that share rows.
  CUTLASS_DEVICE Pairs pairs_of(const Block& block) const {
    Pairs pairs;
    CUTLASS_PRAGMA_UNROLL
    for (int t = 0; t < 4; ++t) {
      const int32_t column = block.column + 8 * lane_ + 2 * t;
      const int32_t at = column - p_.pitch.divide(column) * p_.g.pitch;
      const uint32_t first = __ballot_sync(0xffffffffu, at < block.columns);
      const uint32_t second = __ballot_sync(0xffffffffu, at + 1 < block.columns);
      const uint32_t wraps = __ballot_sync(0xffffffffu, lane_ > 0 && at < 8);
      if (lane_ % 4 == t) pairs = {first, second, wraps};
    }
    return pairs;
  }

  /// Results one after the other, from each row's phase on. kWhole: all pixels are results.
  template <int kFirst, int kRows, bool kPrepared, bool kPairs, bool kWhole>
  CUTLASS_DEVICE void write_boxes(const float (&v)[kValues], const Coordinates& at) {
    float* to[kRows];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      to[r] = staging_ + (r * 8 + lane_ / 4) * kPitch + at.pixel0 +
              phase_of(result_index(at, at.channels[kFirst + r]));
    }
    const int32_t gap = p_.g.pitch - at.block.width;
    Pairs pairs = pairs_;
    if constexpr (!kWhole && !kPrepared) pairs = pairs_of(at.block);
    if constexpr (!kWhole) {
      const int32_t row = p_.pitch.divide(at.block.column + at.pixel0);
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRows; ++r) to[r] -= row * gap;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Coordinates::kColumnPairs; ++j) {
      const bool first = kWhole || (pairs.first >> j & 1) != 0;
      const bool second = kWhole || (pairs.second >> j & 1) != 0;
      const bool wraps = !kWhole && j > 0 && (pairs.wraps >> j & 1) != 0;
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const int i = (j * 2 + kFirst + r) * 2;
        if (wraps) to[r] -= gap;
        if constexpr (kPairs) {
          if (first) *reinterpret_cast<float2*>(to[r] + 8 * j) = {v[i], v[i + 1]};
        } else {
          if (first) to[r][8 * j] = v[i];
          if (second) to[r][8 * j + 1] = v[i + 1];
        }
      }
    }
  }

  /// Floats from a sector's start to a result; its staged row begins there.
  CUTLASS_DEVICE int32_t phase_of(int64_t result) const {
    return in_runs() ? int32_t((result + p_.out_phase) & (kSector - 1)) : 0;
  }

  /// What is to be sent of `count` of the warp's rows from `first_row` on, a lane each: whole
  /// sectors by a bulk store; what is left at the ends of a run, at most seven each, is stored
  /// alone.
  CUTLASS_DEVICE void post(int first_row, int count) {
    const Run& run = run_;
    const int of_box = lane_ - first_row;
    const bool mine = of_box >= 0 && of_box < count;
    const float* from = staging_ + of_box * kPitch;
    const bool ragged = run.begin < run.middle || run.after < run.end;
    if (mine && run.exists && ragged) {
#pragma unroll 1
      for (int32_t i = run.begin < run.middle ? run.begin : run.after; i < run.end;
           i = i + 1 == run.middle ? run.after : i + 1) {
        run.to[i] = from[i];
      }
    }
    const uint32_t bytes = run.exists ? uint32_t(run.after - run.middle) * 4 : 0;
    uint4* const to = sends();
    if (mine) {
      const auto address = reinterpret_cast<uint64_t>(run.to + run.middle);
      to[of_box] = {uint32_t(address), uint32_t(address >> 32), shared_address(from + run.middle),
                    bytes};
    }
    __syncwarp();
    // Rows that exist come first.
    posted_ = __popc(__ballot_sync(0xffffffffu, mine && run.exists));
    even_ = __all_sync(0xffffffffu, !mine || !run.exists || bytes != 0) && posted_ % 4 == 0;
    sent_ = 0;
  }

  /// What the warp posts; for all of its lanes at once.
  CUTLASS_DEVICE uint4* sends() const {
    return reinterpret_cast<uint4*>(shared_ + p_.shared.sends) +
           __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0) * kSendsOfWarp;
  }

  /// Sends what was posted, or four rows more of it. One lane issues all, of uniform operands: else
  /// the compiler makes a loop over lanes of each.
  CUTLASS_DEVICE void issue(int end) {
    const uint4* from = sends();
    if (cute::elect_one_sync()) {
      if (even_) {
#pragma unroll 1
        for (int i = sent_; i < end; i += 4) {
          CUTLASS_PRAGMA_UNROLL
          for (int k = 0; k < 4; ++k) bulk_store(from[i + k]);
        }
      } else {
#pragma unroll 1
        for (int i = sent_; i < end; ++i) {
          const uint4 send = from[i];
          if (send.w != 0) bulk_store(send);
        }
      }
      cute::tma_store_arrive();
    }
    sent_ = end;
  }

  CUTLASS_DEVICE static void bulk_store(const uint4& send) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                     uint64_t(send.y) << 32 | send.x),
                 "r"(send.z), "r"(send.w)
                 : "memory");
  }
};

}  // namespace cutfuse::conv::shift::sm90
