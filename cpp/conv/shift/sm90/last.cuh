/// \file
/// Stores a block's results in channels_last: a warpgroup puts some pixels with all its channels
/// next to each other in shared memory. Storing sectors of eight channels alone, which a warp has,
/// took half of a kernel's time (H200).
#pragma once

#include "conv/shift/sm90/pixels.cuh"
#include "device/values.cuh"

namespace cutfuse::conv::shift::sm90 {

template <int kN>
class LastStore {
 public:
  static constexpr int kPixels = kN / 4;  // at a time: what fits in the warps' staging areas

  /// `area`: of the warpgroup's warps together.
  CUTLASS_DEVICE LastStore(const Params& params, const TileOf& tile, float* area)
      : p_(params), tile_(tile), area_(area), thread_(int(threadIdx.x) % 128) {
    warps_ = min(4, params.g.weight_rows / 16 - tile.m_block * 4);
    pitch_ = warps_ * 16 + 4;  // no conflicts
  }

  /// `block` is that of rows that are not stacked.
  CUTLASS_DEVICE void run(const float (&v)[kN / 2], const PlaneCoordinates<kN>& at,
                          const Block& block) const {
    // What this thread stores: four channels of every eighth pixel.
    const int column = thread_ % (warps_ * 4) * 4;
    const int from_pixel = thread_ / (warps_ * 4);
    const int32_t row = tile_.m_block * 64 + column;
    const int32_t channel = channel_of_row(p_.g, tile_.m_tile, row);
    const Block mine = stacked_block(p_, block, stacked_row(p_.g, row));
    const PlaneCoordinates<kN> places{p_, mine, {}, at.image, from_pixel};
    const int32_t all = p_.g.out_channels * p_.g.groups;
    const int64_t plane = int64_t(p_.g.out_height) * p_.g.out_width;
    const int32_t gap = p_.g.pitch - mine.width;
    const int32_t grid_row = p_.pitch.divide(mine.column + from_pixel);
    int64_t to = (at.image * plane + mine.output + from_pixel - grid_row * gap) * all +
                 tile_.group * p_.g.out_channels + channel;
    const int channels = min(p_.g.out_channels - channel, 4);
    const uint32_t size = size_of(p_.dtype);
    const bool whole = channels == 4 && all % 4 == 0 &&
                       (reinterpret_cast<uintptr_t>(p_.out) + to * size) % (4 * size) == 0;
    const uint32_t own = channel < 0 ? 0 : own_pixels(p_, places, 0);
    const uint32_t wraps = wraps_of(mine.column + from_pixel);
    const int lane = thread_ % 32;
    float* staged = area_ + at.pixel0 * pitch_ + thread_ / 32 * 16 + lane / 4;
    const float* from = area_ + from_pixel * pitch_ + column;
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < kN; first += kPixels) {
      sync();
      CUTLASS_PRAGMA_UNROLL
      for (int i = first / 2; i < (first + kPixels) / 2; ++i) {
        const int pixel = i / 4 * 8 + i % 2 - first;
        staged[pixel * pitch_ + i / 2 % 2 * 8] = v[i];
      }
      sync();
      const auto each = [&](const auto& body) {
        CUTLASS_PRAGMA_UNROLL
        for (int n = first / 8; n < (first + kPixels) / 8; ++n) {
          if (n > 0 && (wraps >> n & 1) != 0) to -= gap * all;
          if ((own >> n & 1) != 0) {
            body(*reinterpret_cast<const float4*>(from + (8 * n - first) * pitch_));
          }
          to += 8 * all;
        }
      };
      if (!whole) {
        each([&](const float4& some) { store(some, to, channels); });
      } else if (p_.dtype == DType::kFloat32) {
        each([&](const float4& some) {
          *reinterpret_cast<float4*>(static_cast<float*>(p_.out) + to) = some;
        });
      } else {
        each([&](const float4& some) {
          *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p_.out) + to) = {
              pack_pair(some.x, some.y, p_.dtype), pack_pair(some.z, some.w, p_.dtype)};
        });
      }
    }
    sync();  // before the area is written again, by whomever
  }

 private:
  const Params& p_;
  const TileOf& tile_;
  float* area_;
  int thread_, warps_, pitch_;

  /// All warps of the warpgroup that have channels.
  CUTLASS_DEVICE void sync() const {
    cutlass::arch::NamedBarrier::sync(warps_ * 32, kLastBarrier + threadIdx.x / 128);
  }

  /// Bit n: a row of the grid begins within the eight pixels up to the n-th that follows `column`.
  CUTLASS_DEVICE uint32_t wraps_of(int32_t column) const {
    uint32_t wraps = 0;
    const int32_t rest = p_.g.pitch - (column - p_.pitch.divide(column) * p_.g.pitch);
#pragma unroll 1
    for (int32_t pixel = rest; pixel < kN; pixel += p_.g.pitch)
      wraps |= 1u << ((pixel + 7) / 8 & 31);
    return wraps;
  }

  CUTLASS_DEVICE void store(const float4& some, int64_t to, int channels) const {
    store_value(p_.out, to, some.x, p_.dtype);
    if (channels > 1) store_value(p_.out, to + 1, some.y, p_.dtype);
    if (channels > 2) store_value(p_.out, to + 2, some.z, p_.dtype);
    if (channels > 3) store_value(p_.out, to + 3, some.w, p_.dtype);
  }
};

}  // namespace cutfuse::conv::shift::sm90
