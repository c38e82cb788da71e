/// \file
/// Stores a block's results in channels_last: a warpgroup puts some pixels with all its channels
/// next to each other in shared memory. Sectors of eight channels alone, which a warp has, cost
/// four to six cycles each (H200): three times as long as the convolution.
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
    const int quads = warps_ * 4;
    const int column = thread_ % quads * 4;
    const int32_t row = tile_.m_block * 64 + column;
    const int32_t channel = channel_of_row(p_.g, tile_.m_tile, row);
    const Block mine = stacked_block(p_, block, stacked_row(p_.g, row));
    const PlaneCoordinates<kN> places{p_, mine, {}, at.image, 0};
    const int lane = thread_ % 32;
    float* to = area_ + at.pixel0 * pitch_ + thread_ / 32 * 16 + lane / 4;
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < kN; first += kPixels) {
      sync();
      CUTLASS_PRAGMA_UNROLL
      for (int i = first / 2; i < (first + kPixels) / 2; ++i) {
        const int pixel = i / 4 * 8 + i % 2 - first;
        to[pixel * pitch_ + i / 2 % 2 * 8] = v[i];
      }
      sync();
      if (channel >= 0) store(places, first, thread_ / quads, column, channel);
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

  CUTLASS_DEVICE void store(const PlaneCoordinates<kN>& places, int first, int from_pixel,
                            int column, int32_t channel) const {
    const Block& block = places.block;
    const int32_t stride = p_.g.strip != 0 ? p_.g.strip : p_.g.block_outputs;
    const int32_t last = min(block.lead + stride, block.end - block.output);
    const int32_t all = p_.g.out_channels * p_.g.groups;
    const int64_t plane = int64_t(p_.g.out_height) * p_.g.out_width;
    const int64_t out =
        (places.image * plane + block.output) * all + tile_.group * p_.g.out_channels + channel;
    const int32_t channels = min(p_.g.out_channels - channel, 4);
    const uint32_t size = size_of(p_.dtype);
    const bool whole = channels == 4 && all % 4 == 0 &&
                       (reinterpret_cast<uintptr_t>(p_.out) + out * size) % (4 * size) == 0;
#pragma unroll 4
    for (int pixel = from_pixel; pixel < kPixels; pixel += 8) {
      bool exists;
      const int32_t result = places.position(first + pixel, &exists);
      if (!exists || result < block.lead || result >= last) continue;
      const float4 v = *reinterpret_cast<const float4*>(area_ + pixel * pitch_ + column);
      const int64_t to = out + int64_t(result) * all;
      if (whole && p_.dtype == DType::kFloat32) {
        *reinterpret_cast<float4*>(static_cast<float*>(p_.out) + to) = v;
      } else if (whole) {
        *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p_.out) + to) = {
            pack_pair(v.x, v.y, p_.dtype), pack_pair(v.z, v.w, p_.dtype)};
      } else {
        store_value(p_.out, to, v.x, p_.dtype);
        if (channels > 1) store_value(p_.out, to + 1, v.y, p_.dtype);
        if (channels > 2) store_value(p_.out, to + 2, v.z, p_.dtype);
        if (channels > 3) store_value(p_.out, to + 3, v.w, p_.dtype);
      }
    }
  }
};

}  // namespace cutfuse::conv::shift::sm90
