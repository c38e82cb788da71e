/// \file
/// Stores a block's results: runs of whole sectors, through shared memory.
#pragma once

#include "conv/shift/sm90/pixels.cuh"
#include "device/values.cuh"

namespace cutfuse::conv::shift::sm90 {

template <int kN>
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
    staging_ = reinterpret_cast<float*>(shared + params.shared.staging) +
               (before + int(threadIdx.x) / 32 % 4) * params.shared.staging_boxes * 8 * kPitch;
  }

  /// The warp's staging area, once nothing that it holds is still to be stored: room for kValues /
  /// 2 values of each lane.
  CUTLASS_DEVICE float* scratch() const {
    cute::tma_store_wait<0>();
    __syncwarp();
    return staging_;
  }

  /// Through shared memory to bulk stores of whole sectors, of 16 channels or twice eight.
  CUTLASS_DEVICE void run(const float (&v)[kValues], const Coordinates& at, const TileOf& tile) {
    if (p_.g.warp_channels <= 8) {
      store_rows<0, 1>(v, at, tile);
    } else if (p_.shared.staging_boxes == 2) {
      store_rows<0, 2>(v, at, tile);
    } else {
      store_rows<0, 1>(v, at, tile);
      store_rows<1, 1>(v, at, tile);
    }
  }

  /// Eight channels of a pixel are a sector already.
  CUTLASS_DEVICE void run_last(const float (&v)[kValues], const Coordinates& at,
                               const bool (&exists)[2]) {
    const int32_t all = p_.g.out_channels * p_.g.groups;
    const int64_t plane = int64_t(p_.g.out_height) * p_.g.out_width;
    const int64_t first = (at.image * plane + at.block.output) * all;
    for_pixels(p_, at, [&](int i, bool own, int32_t result) {
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int64_t to = first + int64_t(result) * all + at.channels[r];
        if (own && exists[r]) store_value(p_.out, to, v[i + 2 * r], p_.dtype);
      }
    });
  }

  CUTLASS_DEVICE void finish() const { cute::tma_store_wait<0>(); }

 private:
  const Params& p_;
  char* shared_;
  int lane_;
  float* staging_;

  /// First and past-the-last result of the block's run that this block stores for a row whose
  /// sectors begin `phase` floats before its first result.
  CUTLASS_DEVICE void window(const Block& block, int32_t phase, int32_t* first,
                             int32_t* last) const {
    const int32_t stride = p_.g.strip != 0 ? p_.g.strip : p_.g.block_outputs;
    const auto to_sector = [&](int32_t at) {
      return at + ((kSector - ((phase + at) & (kSector - 1))) & (kSector - 1));
    };
    *first = block.starts ? 0 : to_sector(block.lead);
    *last = min(to_sector(block.lead + stride), block.end - block.output);
  }

  CUTLASS_DEVICE int64_t result_index(const Coordinates& at, int32_t channel) const {
    const int64_t all = int64_t(p_.g.out_channels) * p_.g.groups;
    const int64_t plane = int64_t(p_.g.out_height) * p_.g.out_width;
    return (at.image * all + channel) * plane + at.block.output;
  }

  /// Rows kFirst ... kFirst + kRows - 1 of the thread.
  template <int kFirst, int kRows>
  CUTLASS_DEVICE void store_rows(const float (&v)[kValues], const Coordinates& at,
                                 const TileOf& tile) {
    cute::tma_store_wait<0>();
    __syncwarp();
    if (p_.pairs) {
      if (at.block.column + kN <= at.block.columns) {
        write_boxes<kFirst, kRows, true, true>(v, at);
      } else {
        write_boxes<kFirst, kRows, true, false>(v, at);
      }
    } else {
      write_boxes<kFirst, kRows, false, false>(v, at);
    }
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    send<kFirst * 8, kRows * 8>(at, tile);
  }

  /// Results one after the other, from each row's phase on. kWhole: all pixels are results.
  template <int kFirst, int kRows, bool kPairs, bool kWhole>
  CUTLASS_DEVICE void write_boxes(const float (&v)[kValues], const Coordinates& at) {
    float* to[kRows];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      to[r] = staging_ + (r * 8 + lane_ / 4) * kPitch + at.pixel0 +
              phase_of(at, at.channels[kFirst + r]);
    }
    const int32_t columns = at.block.columns;
    const int32_t pitch = p_.g.pitch;
    const int32_t gap = pitch - at.block.width;
    int32_t column = at.block.column + at.pixel0;
    if constexpr (!kWhole) {
      const int32_t row = p_.pitch.divide(column);
      column -= row * pitch;
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRows; ++r) to[r] -= row * gap;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Coordinates::kColumnPairs; ++j) {
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const int i = (j * 2 + kFirst + r) * 2;
        if constexpr (kPairs) {
          if (kWhole || column < columns) {
            *reinterpret_cast<float2*>(to[r] + 8 * j) = {v[i], v[i + 1]};
          }
        } else {
          if (column < columns) to[r][8 * j] = v[i];
          if (column + 1 < columns) to[r][8 * j + 1] = v[i + 1];
        }
      }
      if constexpr (kWhole) continue;
      column += 8;
      if (column >= pitch) {
        column -= pitch;
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < kRows; ++r) to[r] -= gap;
      }
    }
  }

  /// Floats from a sector's start to the first result of a channel.
  CUTLASS_DEVICE int32_t phase_of(const Coordinates& at, int32_t channel) const {
    return int32_t((result_index(at, channel) + p_.out_phase) & (kSector - 1));
  }

  /// Sends the warp's rows kFirst ... kFirst + kRows - 1, a lane each: whole sectors by a bulk
  /// store; what is left at the ends of a run, at most seven each, alone.
  template <int kFirst, int kRows>
  CUTLASS_DEVICE void send(const Coordinates& at, const TileOf& tile) const {
    const int of_box = lane_ % kRows;
    const int32_t channel = channel_of_row(p_.g, tile.m_tile, tile.row(kFirst + of_box));
    const int64_t result = result_index(at, tile.group * p_.g.out_channels + max(channel, 0));
    const auto phase = int32_t((result + p_.out_phase) & (kSector - 1));
    int32_t first, last;
    window(at.block, phase, &first, &last);
    float* to = static_cast<float*>(p_.out) + result - phase;
    const float* from = staging_ + of_box * kPitch;
    const int32_t begin = phase + first;
    const int32_t end = phase + last;
    const int32_t middle = min((begin + kSector - 1) & ~(kSector - 1), end);
    const int32_t after = max(end & ~(kSector - 1), middle);
    const bool exists = channel >= 0;
    if (exists && lane_ < kRows && (begin < middle || after < end)) {
#pragma unroll 1
      for (int32_t i = begin < middle ? begin : after; i < end;
           i = i + 1 == middle ? after : i + 1) {
        to[i] = from[i];
      }
    }
    // One lane issues all, of uniform operands: else the compiler makes a loop over lanes of each.
    auto* sends = reinterpret_cast<uint4*>(shared_ + p_.shared.sends) +
                  __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0) * kSendsOfWarp;
    const uint32_t bytes = exists ? uint32_t(after - middle) * 4 : 0;
    if (lane_ < kRows) {
      const auto address = reinterpret_cast<uint64_t>(to + middle);
      sends[lane_] = {uint32_t(address), uint32_t(address >> 32), shared_address(from + middle),
                      bytes};
    }
    __syncwarp();
    // Rows that exist come first.
    const int rows = __popc(__ballot_sync(0xffffffffu, lane_ < kRows && exists));
    const bool even = __all_sync(0xffffffffu, !exists || bytes != 0) && rows % 4 == 0;
    if (cute::elect_one_sync()) {
      if (even) {
#pragma unroll 1
        for (int i = 0; i < rows; i += 4) {
          CUTLASS_PRAGMA_UNROLL
          for (int k = 0; k < 4; ++k) bulk_store(sends[i + k]);
        }
      } else {
#pragma unroll 1
        for (int i = 0; i < rows; ++i) {
          const uint4 send = sends[i];
          if (send.w != 0) bulk_store(send);
        }
      }
      cute::tma_store_arrive();
    }
  }

  CUTLASS_DEVICE static void bulk_store(const uint4& send) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                     uint64_t(send.y) << 32 | send.x),
                 "r"(send.z), "r"(send.w)
                 : "memory");
  }
};

}  // namespace cutfuse::conv::shift::sm90
