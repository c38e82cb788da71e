/// \file
/// A block's results: undo the scales, run the program, store or collect batch-norm statistics.
#pragma once

#include "conv/shift/sm90/last.cuh"
#include "conv/shift/sm90/statistics.cuh"
#include "conv/shift/sm90/steps.cuh"
#include "conv/shift/sm90/store.cuh"
#include "device/values.cuh"
#include "program/fold.cuh"
#include "program/step_math.h"

namespace cutfuse::conv::shift::sm90 {

template <int kN, Role kRole>
class Epilogue {
 public:
  static constexpr int kValues = kN / 2;
  using Coordinates = PlaneCoordinates<kN>;

  CUTLASS_DEVICE Epilogue(const Params& params, char* shared)
      : p_(params),
        rows_(reinterpret_cast<const RowConstants*>(shared + params.shared.rows)),
        lane_(int(threadIdx.x) % 32),
        store_(params, shared),
        statistics_(params) {}

  /// While the block's products are on their way: sends what the block before has left, and
  /// prepares run<true>(), which need not follow. Role::kStore.
  CUTLASS_DEVICE void prepare(const TileOf& tile, const Block& block) {
    store_.template send_rest<true>();
    if (tile.row(0) >= p_.g.weight_rows) return;
    const Block mine = stacked_block(p_, block, stacked_row(p_.g, tile.row(0)));
    store_.prepare(coordinates(tile, mine), tile);
  }

  /// Sends what run<kPrepared>() has left; or, of run<false>(), four rows of it. Role::kStore.
  template <bool kPrepared>
  CUTLASS_DEVICE void send_rest() {
    store_.template send_rest<kPrepared>();
  }
  CUTLASS_DEVICE void send_some() { store_.send_some(); }

  template <bool kPrepared>
  CUTLASS_DEVICE void run(float (&v)[kValues], const TileOf& tile, const Block& block,
                          int32_t exponent, bool finite) {
    if (tile.row(0) >= p_.g.weight_rows) return;
    const Block mine = stacked_block(p_, block, stacked_row(p_.g, tile.row(0)));
    const Coordinates at = coordinates(tile, mine);
    const bool collects = this->collects();
    const float base[2] = {collects ? statistics_.near(0) : 0.f,
                           collects ? statistics_.near(1) : 0.f};
    const bool deviates = apply(v, at, base, exponent, finite, tile);
    if constexpr (kRole == Role::kAny || kRole == Role::kLast) {
      if (p_.first_staged < p_.program.count) run_steps<kN>(p_, v, at, store_.scratch());
    }
    if constexpr (kRole == Role::kLast) {
      LastStore<kN>(p_, tile, store_.of_warpgroup()).run(v, at, block);
    } else if (!collects) {
      store_.template run<kPrepared>(v, at, tile);
    } else {
      if (!deviates) subtract(v, base);
      statistics_.run(v, at, base);
    }
  }

  /// Before the (group, m tile) changes, and at the end: what was collected goes out.
  CUTLASS_DEVICE void flush(const TileOf& tile) {
    if constexpr (kRole == Role::kStatistics || kRole == Role::kAny) {
      if (p_.partials != nullptr) statistics_.flush(tile);
    }
  }

  CUTLASS_DEVICE void finish() { store_.finish(); }

 private:
  const Params& p_;
  const RowConstants* rows_;
  int lane_;
  Store<kN, kRole == Role::kStore> store_;
  Statistics<kN> statistics_;

  CUTLASS_DEVICE bool collects() const {
    return kRole == Role::kStatistics || (kRole == Role::kAny && p_.partials != nullptr);
  }

  CUTLASS_DEVICE Coordinates coordinates(const TileOf& tile, const Block& mine) const {
    Coordinates at{p_, mine, {}, tile.image, lane_ % 4 * 2};
    for (int r = 0; r < 2; ++r) {
      const int32_t channel = channel_of_row(p_.g, tile.m_tile, tile.row(lane_ / 4 + 8 * r));
      at.channels[r] = tile.group * p_.g.out_channels + max(channel, 0);
    }
    return at;
  }

  /// The affine steps and the bounds. Returns whether `base` is subtracted already.
  CUTLASS_DEVICE bool apply(float (&v)[kValues], const Coordinates& at, const float (&base)[2],
                            int32_t exponent, bool finite, const TileOf& tile) {
    const int32_t row0 = tile.row(lane_ / 4);
    const RowConstants row[2] = {rows_[row0], rows_[row0 + 8]};
    // With both scales in range their product is.
    const bool plain = row[0].plain != 0 && row[1].plain != 0 && abs(exponent) <= 30;
    const bool folds = kRole == Role::kStatistics && p_.affine_steps == p_.program.count;
    bool deviates = false;
    if (finite && __all_sync(0xffffffffu, plain)) {
      const float unscale = power_of_two(-exponent);
      const float scale[2] = {row[0].scale * unscale, row[1].scale * unscale};
      const float shift[2] = {row[0].shift - (folds ? base[0] : 0.f),
                              row[1].shift - (folds ? base[1] : 0.f)};
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (r == 1 && p_.g.warp_channels <= 8) break;  // none of the second row's is stored
        CUTLASS_PRAGMA_UNROLL
        for (int i = 2 * r; i < kValues; i += 4) {
          v[i] = fmaf(v[i], scale[r], shift[r]);
          v[i + 1] = fmaf(v[i + 1], scale[r], shift[r]);
        }
      }
      deviates = folds;
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kValues; ++i) scale_exactly(v[i], exponent + row[i / 2 % 2].exponent);
      repair(v, at, tile);
      execute_affine(v, at);
    }
    if (p_.clamps) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kValues; ++i) v[i] = minimum(maximum(v[i], p_.lowest), p_.highest);
    }
    return deviates;
  }

  CUTLASS_DEVICE void execute_affine(float (&v)[kValues], const Coordinates& at) const {
#pragma unroll 1
    for (int32_t s = 0; s < p_.affine_steps; ++s) {
      const Step& step = p_.program.steps[s];
      float operand[2] = {step.constants[0], step.constants[0]};
      if (step.operand >= 0) {
        const Operand& o = p_.program.operands[step.operand];
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          const int64_t row = p_.phases_made.divide(at.channels[r]);
          operand[r] = load_value(o.data, row * o.row_stride, o.dtype);
        }
      }
      // v * o - 0 and v * 1 + o are the step's own results; branches would cost copies of v.
      const bool multiplies = step.op == Op::kMul;
      const float sign = step.op == Op::kSub ? -1.f : 1.f;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kValues; ++i) {
        const float o = operand[i / 2 % 2];
        v[i] = fmaf(v[i], multiplies ? o : 1.f, multiplies ? -0.f : sign * o);
      }
    }
  }

  /// Values that are not finite are computed again, exactly where they are: a patch spreads a
  /// non-finite input further than the convolution does, never less far. Meanwhile a row's values
  /// lie in the staging area, where they can be indexed.
  CUTLASS_DEVICE void repair(float (&v)[kValues], const Coordinates& at, const TileOf& tile) {
    float* mine = store_.scratch() + lane_;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      bool wrong = false;
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < kValues / 2; ++k) {
        const float value = v[(k / 2 * 2 + r) * 2 + k % 2];
        mine[32 * k] = value;
        wrong |= !isfinite(value);
      }
      if (!wrong || channel_of_row(p_.g, tile.m_tile, tile.row(lane_ / 4 + 8 * r)) < 0) continue;
#pragma unroll 1
      for (int k = 0; k < kValues / 2; ++k) {
        if (isfinite(mine[32 * k])) continue;
        bool is_result;
        const int32_t result =
            at.block.output + at.position(at.pixel0 + k / 2 * 8 + k % 2, &is_result);
        if (is_result && result < at.block.end) {
          mine[32 * k] = exact(at.channels[r] - tile.group * p_.g.out_channels, tile, result);
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < kValues / 2; ++k) v[(k / 2 * 2 + r) * 2 + k % 2] = mine[32 * k];
    }
  }

  CUTLASS_DEVICE float exact(int32_t channel, const TileOf& tile, int32_t result) const {
    const Geometry& g = p_.g;
    const int32_t top = result / g.out_width * g.stride_h - g.pad_h;
    const int32_t left = result % g.out_width * g.stride_w - g.pad_w;
    const int64_t image = tile.image * p_.x_image + int64_t(tile.group) * g.channels * p_.x_channel;
    const MadeChannel to = made_channel(g, channel);
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
          const int64_t tap = p_.weight.index(g, tile.group, to, c, r, s);
          if (tap == WeightView::kNoTap) continue;
          const float w = load_value(p_.weight.data, tap, p_.dtype);
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
};

}  // namespace cutfuse::conv::shift::sm90
