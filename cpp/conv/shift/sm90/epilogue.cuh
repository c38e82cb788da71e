/// \file
/// A block's results: undo the scales, run the program, store runs of whole sectors, or collect
/// batch-norm statistics instead.
#pragma once

#include "conv/shift/sm90/layout.cuh"
#include "device/values.cuh"
#include "program/executor.cuh"
#include "program/fold.cuh"

namespace cutfuse::conv::shift::sm90 {

/// Where a thread's values lie: value (j * 2 + r) * 2 + c is of row row0 + 8 r of the weights' tile
/// and of pixel pixel0 + 8 j + c of the block.
template <int kN>
struct PlaneCoordinates {
  static constexpr int kRows = 2;
  static constexpr int kColumnPairs = kN / 8;
  static constexpr int kSize = kN / 2;
  static constexpr int kColumnPairStride = 8;
  static constexpr int kStagedOperands = 0;
  static constexpr bool kPlanes = true;

  const Params& p;
  const Block& block;
  int32_t channels[2];  // in all groups; clamped to those that exist
  int64_t image;
  int32_t pixel0;

  /// Result, within its run, of a pixel of the block.
  CUTLASS_DEVICE int32_t position(int32_t pixel, bool* exists) const {
    const int32_t column = block.column + pixel;
    const int32_t row = p.pitch.divide(column);
    *exists = column - row * p.g.pitch < block.columns;
    return pixel - row * p.g.reach_columns;
  }
  CUTLASS_DEVICE int64_t column(int j, int c) const {
    bool exists;
    const int32_t at = block.output + position(pixel0 + 8 * j + c, &exists);
    return min(at, p.g.out_height * p.g.out_width - 1);
  }
  CUTLASS_DEVICE int64_t row_offset(int r, const Operand& operand) const {
    const int64_t all = int64_t(p.g.out_channels) * p.g.groups;
    const int64_t row = operand.col_stride != 0 ? image * all + channels[r] : channels[r];
    return row * operand.row_stride;
  }
};

/// Which of a block's eights of pixels are not eight results in a row.
CUTLASS_DEVICE uint32_t find_breaks(const Params& p, const Block& block, int32_t pixels) {
  const Geometry& g = p.g;
  uint32_t breaks = 0;
  if (g.strip != 0 || g.reach_columns == 0) return breaks;
  for (int32_t gap = block.columns - block.column; gap < pixels; gap += g.pitch) {
    const int32_t last = min(gap + g.reach_columns - 1, pixels - 1) / 8;
    breaks |= (2u << last) - (1u << gap / 8);
  }
  return breaks;
}

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

template <int kN>
class Epilogue {
 public:
  static constexpr int kValues = kN / 2;
  using Coordinates = PlaneCoordinates<kN>;

  CUTLASS_DEVICE Epilogue(const Params& params, char* shared)
      : p_(params),
        rows_(reinterpret_cast<const RowConstants*>(shared + params.shared.rows)),
        warp_(int(threadIdx.x) / 32 % 4),
        lane_(int(threadIdx.x) % 32) {
    staging_ =
        reinterpret_cast<float*>(shared + params.shared.staging) +
        int(threadIdx.x) / 32 * params.shared.staging_boxes * 8 * params.shared.staging_pitch;
  }

  CUTLASS_DEVICE void run(float (&v)[kValues], const Tile& tile, const Block& block,
                          int32_t exponent, int32_t m_block) {
    const int32_t row0 = m_block * 64 + warp_ * 16 + lane_ / 4;
    bool exists[2];
    Coordinates at{p_, block, {}, tile.image, lane_ % 4 * 2};
    for (int r = 0; r < 2; ++r) {
      const int32_t channel = channel_of_row(p_.g, tile.m_tile, row0 + 8 * r);
      exists[r] = channel >= 0;
      at.channels[r] = tile.group * p_.g.out_channels + max(channel, 0);
    }
    apply(v, at, row0, exponent, tile);
    if (p_.partials != nullptr) {
      collect(v, at, exists);
    } else if (p_.channels_last) {
      store_last(v, at, exists);
    } else {
      store(v, at, exists);
    }
  }

  /// Before the (group, m tile) changes, and at the end: what was collected goes out.
  CUTLASS_DEVICE void flush(int32_t group, int32_t m_tile, int32_t m_block) {
    if (p_.partials == nullptr) return;
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
          channel_of_row(p_.g, m_tile, m_block * 64 + warp_ * 16 + lane_ / 4 + 8 * r);
      if (lane_ % 4 == 0 && channel >= 0) {
        const int32_t block = p_.g.m_blocks == 2 ? 0 : int32_t(threadIdx.x) / 128;
        const int64_t row = int64_t(group) * p_.g.out_channels + channel;
        p_.partials[row * p_.partial_count + (2 / p_.g.m_blocks) * int32_t(blockIdx.x) + block] = {
            running_[r].mean, running_[r].m2, running_[r].count};
      }
      running_[r] = Running{};
    }
  }

  CUTLASS_DEVICE void finish() { cute::tma_store_wait<0>(); }

 private:
  const Params& p_;
  const RowConstants* rows_;
  int warp_, lane_;
  float* staging_;
  Running running_[2];

  CUTLASS_DEVICE void apply(float (&v)[kValues], const Coordinates& at, int32_t row0,
                            int32_t exponent, const Tile& tile) {
    RowConstants row[2] = {rows_[row0], rows_[row0 + 8]};
    float checks[4] = {0.f, 0.f, 0.f, 0.f};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kValues; ++i) checks[i % 4] = fmaf(v[i], 0.f, checks[i % 4]);
    const float check = (checks[0] + checks[1]) + (checks[2] + checks[3]);
    // With both scales in range their product is.
    const bool plain =
        check == 0.f && row[0].plain != 0 && row[1].plain != 0 && abs(exponent) <= 30;
    if (__all_sync(0xffffffffu, plain)) {
      const float unscale = power_of_two(-exponent);
      const float scale[2] = {row[0].scale * unscale, row[1].scale * unscale};
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kValues; ++i) {
        const int r = i / 2 % 2;
        v[i] = fmaf(v[i], scale[r], row[r].shift);
      }
      execute(p_.program, v, at, p_.affine_steps);
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kValues; ++i) scale_exactly(v[i], exponent + row[i / 2 % 2].exponent);
      if (__any_sync(0xffffffffu, check != 0.f)) repair(v, at, tile);
      execute(p_.program, v, at);
    }
  }

  /// Values that are not finite are computed again, exactly where they are: a patch spreads a
  /// non-finite input further than the convolution does, never less far.
  CUTLASS_DEVICE void repair(float (&v)[kValues], const Coordinates& at, const Tile& tile) {
    float copy[kValues];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kValues; ++i) copy[i] = v[i];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int32_t channel = at.channels[r] - tile.group * p_.g.out_channels;
#pragma unroll 1
      for (int k = 0; k < kValues / 2; ++k) {
        float& value = copy[(k / 2 * 2 + r) * 2 + k % 2];
        bool exists;
        const int32_t result =
            at.block.output + at.position(at.pixel0 + k / 2 * 8 + k % 2, &exists);
        if (!isfinite(value) && exists && result < at.block.end) {
          value = exact(channel, tile, result);
        }
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kValues; ++i) v[i] = copy[i];
  }

  CUTLASS_DEVICE float exact(int32_t channel, const Tile& tile, int32_t result) const {
    const Geometry& g = p_.g;
    const int32_t top = result / g.out_width * g.stride_h - g.pad_h;
    const int32_t left = result % g.out_width * g.stride_w - g.pad_w;
    const int64_t image = tile.image * p_.x_image + int64_t(tile.group) * g.channels * p_.x_channel;
    const int64_t filter = tile.group * p_.weight.group + channel * p_.weight.k;
    double sum = 0.0;
    float special = 0.f;  // terms that are not finite
    for (int32_t c = 0; c < g.channels; ++c) {
      for (int32_t r = 0; r < g.kernel_h; ++r) {
        const int32_t row = top + r * g.dilation_h;
        if (uint32_t(row) >= uint32_t(g.height)) continue;
        for (int32_t s = 0; s < g.kernel_w; ++s) {
          const int32_t column = left + s * g.dilation_w;
          if (uint32_t(column) >= uint32_t(g.width)) continue;
          const float x = load_value(
              p_.x, image + c * p_.x_channel + row * p_.x_row + column * p_.x_column, p_.dtype);
          const float w =
              load_value(p_.weight.data,
                         filter + c * p_.weight.c + r * p_.weight.r + s * p_.weight.s, p_.dtype);
          if (isfinite(x) && isfinite(w)) {
            sum += double(x) * double(w);
          } else {
            special += x * w;
          }
        }
      }
    }
    return isfinite(special) && special == 0.f ? float(sum) : special;
  }

  /// First and past-the-last result of the block's run that this block stores for a row whose
  /// sectors begin `phase` floats before its first result.
  CUTLASS_DEVICE void window(const Block& block, int32_t phase, int32_t* first,
                             int32_t* last) const {
    const int32_t stride = p_.g.strip != 0 ? p_.g.strip : p_.g.block_outputs;
    const auto to_sector = [&](int32_t at) {
      return at + ((kSector - ((phase + at) & (kSector - 1))) & (kSector - 1));
    };
    *first = block.starts ? 0 : to_sector(0);
    *last = min(to_sector(stride), block.end - block.output);
  }

  CUTLASS_DEVICE int64_t result_index(const Coordinates& at, int32_t channel) const {
    const int64_t all = int64_t(p_.g.out_channels) * p_.g.groups;
    const int64_t plane = int64_t(p_.g.out_height) * p_.g.out_width;
    return (at.image * all + channel) * plane + at.block.output;
  }

  /// Through shared memory, eight channels at a time, to bulk stores of whole sectors.
  CUTLASS_DEVICE void store(const float (&v)[kValues], const Coordinates& at,
                            const bool (&exists)[2]) {
    const int32_t pitch = p_.shared.staging_pitch;
    const bool two = p_.shared.staging_boxes == 2;
    const uint32_t breaks = find_breaks(p_, at.block, kN);
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (8 * r >= p_.g.warp_channels) break;
      float* box = staging_ + (two ? r * 8 * pitch : 0);
      const int64_t mine = result_index(at, at.channels[r]);
      const int32_t phase = int32_t((mine + p_.out_phase) & (kSector - 1));
      if (two) {
        cute::tma_store_wait<1>();
      } else {
        cute::tma_store_wait<0>();
      }
      __syncwarp();
      write_box(v, at, r, breaks, box + lane_ / 4 * pitch + phase);
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      // Lanes 0, 4, ... know their row's channel.
      if (lane_ % 4 == 0 && exists[r]) send(at.block, mine, phase, box + lane_ / 4 * pitch);
      cute::tma_store_arrive();
    }
  }

  /// Row r's results, one after the other from `row` on.
  CUTLASS_DEVICE void write_box(const float (&v)[kValues], const Coordinates& at, int r,
                                uint32_t breaks, float* row) const {
    float* to = row + at.pixel0;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Coordinates::kColumnPairs; ++j) {
      const float first = v[(j * 2 + r) * 2];
      const float second = v[(j * 2 + r) * 2 + 1];
      if ((breaks >> j & 1) == 0) {
        to[8 * j] = first;
        to[8 * j + 1] = second;
      } else {
        bool exists;
        int32_t result = at.position(at.pixel0 + 8 * j, &exists);
        if (exists) row[result] = first;
        result = at.position(at.pixel0 + 8 * j + 1, &exists);
        if (exists) row[result] = second;
        to = row + at.position(8 * (j + 1), &exists) - 8 * (j + 1) + at.pixel0;
      }
    }
  }

  /// Whole sectors by a bulk store; what is left at the ends of a run, at most seven each, alone.
  CUTLASS_DEVICE void send(const Block& block, int64_t result, int32_t phase,
                           const float* from) const {
    int32_t first, last;
    window(block, phase, &first, &last);
    float* to = static_cast<float*>(p_.out) + result - phase;
    const int32_t begin = phase + first;
    const int32_t end = phase + last;
    const int32_t middle = min((begin + kSector - 1) & ~(kSector - 1), end);
    const int32_t after = max(end & ~(kSector - 1), middle);
    if (after > middle) {
      cute::SM90_BULK_COPY_S2G::copy(from + middle, to + middle, (after - middle) * 4);
    }
    for (int32_t i = begin; i < middle; ++i) to[i] = from[i];
    for (int32_t i = after; i < end; ++i) to[i] = from[i];
  }

  /// Eight channels of a pixel are a sector already.
  CUTLASS_DEVICE void store_last(const float (&v)[kValues], const Coordinates& at,
                                 const bool (&exists)[2]) {
    const int32_t all = p_.g.out_channels * p_.g.groups;
    const int64_t plane = int64_t(p_.g.out_height) * p_.g.out_width;
    const int64_t first = (at.image * plane + at.block.output) * all;
    for_own(at, [&](int i, int32_t result) {
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int64_t to = first + int64_t(result) * all + at.channels[r];
        if (exists[r]) store_value(p_.out, to, v[i + 2 * r], p_.dtype);
      }
    });
  }

  /// How many of the block's pixels come before the first that another block stores.
  CUTLASS_DEVICE int32_t own_results(const Block& block) const {
    const int32_t stride = p_.g.strip != 0 ? p_.g.strip : p_.g.block_outputs;
    return min(stride, block.end - block.output);
  }

  /// body(i, result) for the values of results that are this block's own, a pair of rows each.
  template <class Body>
  CUTLASS_DEVICE void for_own(const Coordinates& at, const Body& body) const {
    const int32_t count = own_results(at.block);
    const uint32_t breaks = find_breaks(p_, at.block, kN);
    int32_t base = at.pixel0;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Coordinates::kColumnPairs; ++j) {
      if ((breaks >> j & 1) == 0) {
        const int32_t result = base + 8 * j;
        if (result < count) body(4 * j, result);
        if (result + 1 < count) body(4 * j + 1, result + 1);
      } else {
        bool exists;
        int32_t result = at.position(at.pixel0 + 8 * j, &exists);
        if (exists && result < count) body(4 * j, result);
        result = at.position(at.pixel0 + 8 * j + 1, &exists);
        if (exists && result < count) body(4 * j + 1, result);
        base = at.position(8 * (j + 1), &exists) - 8 * (j + 1) + at.pixel0;
      }
    }
  }

  CUTLASS_DEVICE void collect(const float (&v)[kValues], const Coordinates& at,
                              const bool (&exists)[2]) {
    float sum[2] = {0.f, 0.f};
    uint32_t own[(kValues + 63) / 64] = {};  // a bit for each pair of rows' values
    for_own(at, [&](int i, int32_t) {
      const int bit = i / 4 * 2 + i % 2;
      own[bit / 32] |= 1u << bit % 32;
      sum[0] += v[i];
      sum[1] += v[i + 2];
    });
    int32_t count = 0;
    CUTLASS_PRAGMA_UNROLL
    for (const uint32_t bits : own) count += __popc(bits);
    const float share = count > 0 ? 1.f / float(count) : 0.f;
    const float mean[2] = {sum[0] * share, sum[1] * share};
    float m2[2] = {0.f, 0.f};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kValues; ++i) {
      const int bit = i / 4 * 2 + i % 2;
      const float d = v[i] - mean[i / 2 % 2];
      if ((own[bit / 32] >> bit % 32 & 1) != 0) m2[i / 2 % 2] = fmaf(d, d, m2[i / 2 % 2]);
    }
    running_[0].add(mean[0], m2[0], count);
    running_[1].add(mean[1], m2[1], count);
  }
};

}  // namespace cutfuse::conv::shift::sm90
