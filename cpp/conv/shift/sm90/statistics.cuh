/// \file
/// Batch-norm statistics of a block's results, instead of storing them.
#pragma once

#include "conv/shift/sm90/pixels.cuh"

namespace cutfuse::conv::shift::sm90 {

/// One warp's statistics of a channel's values so far, spread over its threads.
struct Running {
  float mean = 0.f;
  float m2 = 0.f;
  int32_t count = 0;

  CUTLASS_DEVICE void add(float other_mean, float other_m2, int32_t other) {
    const int32_t all = count + other;
    const float weight = all > 0 ? float(other) / float(all) : 0.f;
    const float delta = other_mean - mean;
    mean = fmaf(delta, weight, mean);
    m2 += other_m2 + delta * delta * (float(count) * weight);
    count = all;
  }
};

/// v -= base, of each row.
template <int kValues>
CUTLASS_DEVICE void subtract(float (&v)[kValues], const float (&base)[2]) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kValues; ++i) v[i] -= base[i / 2 % 2];
}

template <int kN>
class Statistics {
 public:
  static constexpr int kValues = kN / 2;
  using Coordinates = PlaneCoordinates<kN>;

  CUTLASS_DEVICE explicit Statistics(const Params& params) : p_(params) {}

  /// A value near the mean, that of the blocks before: what run() takes are deviations from it.
  CUTLASS_DEVICE float near(int r) const { return running_[r].mean; }

  /// v are deviations from `base`.
  CUTLASS_DEVICE void run(float (&v)[kValues], const Coordinates& at, const float (&base)[2]) {
    if (p_.g.out_width % 2 == 0) {
      collect_each<true>(v, at, base);
    } else {
      collect_each<false>(v, at, base);
    }
  }

  /// Before the (group, m tile) changes, and at the end: what was collected goes out.
  CUTLASS_DEVICE void flush(const TileOf& tile) {
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTLASS_PRAGMA_UNROLL
      for (int distance = 1; distance < 4; distance *= 2) {
        Running& mine = running_[r];
        mine.add(__shfl_xor_sync(0xffffffffu, mine.mean, distance),
                 __shfl_xor_sync(0xffffffffu, mine.m2, distance),
                 __shfl_xor_sync(0xffffffffu, mine.count, distance));
      }
      const int32_t channel =
          channel_of_row(p_.g, tile.m_tile, tile.row(int(threadIdx.x) % 32 / 4 + 8 * r));
      if (threadIdx.x % 4 == 0 && channel >= 0) {
        const int32_t stacked = stacked_row(p_.g, tile.row(0));
        const int32_t block =
            p_.g.m_blocks == 2 ? 0 : int32_t(threadIdx.x) / 128 * p_.g.stack + stacked;
        const int64_t row = int64_t(tile.group) * p_.g.out_channels + channel;
        p_.partials[row * p_.partial_count +
                    (2 / p_.g.m_blocks) * p_.g.stack * int32_t(blockIdx.x) + block] = {
            running_[r].mean, running_[r].m2, running_[r].count};
      }
      running_[r] = Running{};
    }
  }

 private:
  const Params& p_;
  Running running_[2];

  template <bool kPairs>
  CUTLASS_DEVICE void collect_each(float (&v)[kValues], const Coordinates& at,
                                   const float (&base)[2]) {
    float near[2] = {base[0], base[1]};
    if (running_[0].count == 0) {  // nothing is known of the mean: that of these
      float sum[2] = {0.f, 0.f};
      const int32_t count = for_own_pixels<kPairs>(p_, at, [&](int i, bool own) {
        sum[0] += own ? v[i] : 0.f;
        sum[1] += own ? v[i + 2] : 0.f;
      });
      const float share = count > 0 ? 1.f / float(count) : 0.f;
      const float mean[2] = {sum[0] * share, sum[1] * share};
      subtract(v, mean);
      near[0] += mean[0];
      near[1] += mean[1];
    }
    float sum[2] = {0.f, 0.f};
    float squares[2] = {0.f, 0.f};
    const int32_t count = for_own_pixels<kPairs>(p_, at, [&](int i, bool own) {
      if (!own) return;
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const float d = v[i + 2 * r];
        sum[r] += d;
        squares[r] = fmaf(d, d, squares[r]);
      }
    });
    const float share = count > 0 ? 1.f / float(count) : 0.f;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float m2 = fmaxf(fmaf(-sum[r] * share, sum[r], squares[r]), 0.f);
      running_[r].add(fmaf(sum[r], share, near[r]), m2, count);
    }
  }
};

}  // namespace cutfuse::conv::shift::sm90
