/// \file
/// A block's results: undo the scales, run the program, store runs of whole sectors, or collect
/// batch-norm statistics instead.
#pragma once

#include "conv/shift/sm90/pixels.cuh"
#include "device/values.cuh"
#include "program/executor.cuh"
#include "program/fold.cuh"

namespace cutfuse::conv::shift::sm90 {

template <int kN>
class Epilogue {
 public:
  static constexpr int kValues = kN / 2;
  using Coordinates = PlaneCoordinates<kN>;
  static constexpr int kPitch =
      kN + kSector;  // floats of a staged row; 8 modulo 32 or 16: few conflicts

  CUTLASS_DEVICE Epilogue(const Params& params, char* shared)
      : p_(params),
        rows_(reinterpret_cast<const RowConstants*>(shared + params.shared.rows)),
        warp_(int(threadIdx.x) / 32 % 4),
        lane_(int(threadIdx.x) % 32) {
    staging_ = reinterpret_cast<float*>(shared + params.shared.staging) +
               int(threadIdx.x) / 32 * params.shared.staging_boxes * 8 * kPitch;
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
    *first = block.starts ? 0 : to_sector(block.lead);
    *last = min(to_sector(block.lead + stride), block.end - block.output);
  }

  CUTLASS_DEVICE int64_t result_index(const Coordinates& at, int32_t channel) const {
    const int64_t all = int64_t(p_.g.out_channels) * p_.g.groups;
    const int64_t plane = int64_t(p_.g.out_height) * p_.g.out_width;
    return (at.image * all + channel) * plane + at.block.output;
  }

  /// Through shared memory to bulk stores of whole sectors, of 16 channels or twice eight.
  CUTLASS_DEVICE void store(const float (&v)[kValues], const Coordinates& at,
                            const bool (&exists)[2]) {
    if (p_.g.warp_channels <= 8) {
      store_rows<0, 1>(v, at, exists);
    } else if (p_.shared.staging_boxes == 2) {
      store_rows<0, 2>(v, at, exists);
    } else {
      store_rows<0, 1>(v, at, exists);
      store_rows<1, 1>(v, at, exists);
    }
  }

  /// Rows kFirst ... kFirst + kRows - 1 of the thread.
  template <int kFirst, int kRows>
  CUTLASS_DEVICE void store_rows(const float (&v)[kValues], const Coordinates& at,
                                 const bool (&exists)[2]) {
    cute::tma_store_wait<0>();
    __syncwarp();
    if (p_.pairs) {
      write_boxes<kFirst, kRows, true>(v, at);
    } else {
      write_boxes<kFirst, kRows, false>(v, at);
    }
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    const int r = lane_ % 4;  // a lane sends one row
    if (r < kRows && exists[kRows == 2 && r == 1 ? 1 : kFirst]) {
      const int row = kRows == 2 && r == 1 ? 1 : kFirst;
      const int64_t result = result_index(at, row == 1 ? at.channels[1] : at.channels[0]);
      const int32_t phase = int32_t((result + p_.out_phase) & (kSector - 1));
      send(at.block, result, phase, staging_ + (r * 8 + lane_ / 4) * kPitch);
    }
    cute::tma_store_arrive();
  }

  /// Results one after the other, from each row's phase on.
  template <int kFirst, int kRows, bool kPairs>
  CUTLASS_DEVICE void write_boxes(const float (&v)[kValues], const Coordinates& at) {
    float* to[kRows];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      to[r] = staging_ + (r * 8 + lane_ / 4) * kPitch + phase_of(at, kFirst + r) + at.pixel0;
    }
    const int32_t columns = at.block.columns;
    const int32_t pitch = p_.g.pitch;
    const int32_t gap = pitch - at.block.width;
    int32_t column = at.block.column + at.pixel0;
    const int32_t row = p_.pitch.divide(column);
    column -= row * pitch;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) to[r] -= row * gap;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Coordinates::kColumnPairs; ++j) {
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const int i = (j * 2 + kFirst + r) * 2;
        if constexpr (kPairs) {
          if (column < columns) *reinterpret_cast<float2*>(to[r] + 8 * j) = {v[i], v[i + 1]};
        } else {
          if (column < columns) to[r][8 * j] = v[i];
          if (column + 1 < columns) to[r][8 * j + 1] = v[i + 1];
        }
      }
      column += 8;
      if (column >= pitch) {
        column -= pitch;
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < kRows; ++r) to[r] -= gap;
      }
    }
  }

  /// Floats from a sector's start to the first result of row r.
  CUTLASS_DEVICE int32_t phase_of(const Coordinates& at, int r) const {
    return int32_t((result_index(at, at.channels[r]) + p_.out_phase) & (kSector - 1));
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
    if (begin < middle || after < end) {
#pragma unroll 1
      for (int32_t i = begin < middle ? begin : after; i < end;
           i = i + 1 == middle ? after : i + 1) {
        to[i] = from[i];
      }
    }
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

  /// body(i, result of the block) for the values of results that are this block's own, of the
  /// first row of two each.
  template <class Body>
  CUTLASS_DEVICE void for_own(const Coordinates& at, const Body& body) const {
    const int32_t stride = p_.g.strip != 0 ? p_.g.strip : p_.g.block_outputs;
    const int32_t lead = at.block.lead;
    const int32_t last = min(lead + stride, at.block.end - at.block.output);
    Walk walk(p_, at.block, at.pixel0);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Coordinates::kColumnPairs; ++j) {
      const int32_t result = at.pixel0 + 8 * j - walk.skipped();
      if (walk.first() && result >= lead && result < last) body(4 * j, result);
      if (walk.second() && result + 1 < last) body(4 * j + 1, result + 1);
      walk.next();
    }
  }

  CUTLASS_DEVICE void collect(const float (&v)[kValues], const Coordinates& at,
                              const bool (&exists)[2]) {
    // Deviations are taken from a value near the mean: that of the blocks before, at first that of
    // this one.
    float near[2] = {running_[0].mean, running_[1].mean};
    if (running_[0].count == 0) {
      float sum[2] = {0.f, 0.f};
      int32_t count = 0;
      for_own(at, [&](int i, int32_t) {
        sum[0] += v[i];
        sum[1] += v[i + 2];
        ++count;
      });
      const float share = count > 0 ? 1.f / float(count) : 0.f;
      near[0] = sum[0] * share;
      near[1] = sum[1] * share;
    }
    float sum[2] = {0.f, 0.f};
    float squares[2] = {0.f, 0.f};
    int32_t count = 0;
    for_own(at, [&](int i, int32_t) {
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const float d = v[i + 2 * r] - near[r];
        sum[r] += d;
        squares[r] = fmaf(d, d, squares[r]);
      }
      ++count;
    });
    const float share = count > 0 ? 1.f / float(count) : 0.f;
    float mean[2];
    float m2[2];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      mean[r] = fmaf(sum[r], share, near[r]);
      m2[r] = fmaxf(fmaf(-sum[r] * share, sum[r], squares[r]), 0.f);
    }
    running_[0].add(mean[0], m2[0], count);
    running_[1].add(mean[1], m2[1], count);
  }
};

}  // namespace cutfuse::conv::shift::sm90
