/// \file
/// The epilogue of a layer that is turned over: rows of a tile are features, columns rows of out.
#pragma once

#include <cutlass/cutlass.h>

#include "cutfuse/batch_norm.h"
#include "gemm/launcher.h"
#include "gemm/sm90/exchange.cuh"
#include "gemm/sm90/matrices.cuh"
#include "gemm/sm90/nchw_repair.cuh"
#include "gemm/sm90/store.cuh"
#include "gemm/stage.cuh"
#include "gemm/turned.h"
#include "gemm/unscale.cuh"

namespace cutfuse::gemm::sm90 {

/// Stages the words of B's rows; whether all of them are plain.
template <int kColumns>
CUTLASS_DEVICE bool stage_words(const int32_t* words, int first, int columns, int lane,
                                int32_t* slots) {
  bool plain = true;
  CUTLASS_PRAGMA_UNROLL
  for (int n = lane; n < kColumns; n += cutlass::NumThreadsPerWarp) {
    const int word = __ldg(words + min(first + n, columns - 1));
    plain &= is_plain(word);
    slots[n] = word;
  }
  return __all_sync(0xffffffffu, plain);
}

/// Undoes the scales of B's rows, and sums again what is not finite.
template <class Coordinates>
CUTLASS_DEVICE void unscale_turned(float (&v)[Coordinates::kSize], const Coordinates& at,
                                   bool columns_plain, const EpilogueArguments& arguments,
                                   int lane) {
  constexpr int kRows = Coordinates::kRows;
  if (columns_plain) {
    for_each_pair<Coordinates>([&](int j) {
      const int2 words = at.read_slot(0, j);
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRows; ++r) {
        v[(j * kRows + r) * 2] *= power_of_two(-row_exponent(words.x));
        v[(j * kRows + r) * 2 + 1] *= power_of_two(-row_exponent(words.y));
      }
    });
  } else {
    const int none[kRows] = {};
    if (unscale(v, none, at)) mark_columns(v, at);
  }
  if (are_finite(v)) return;
  const auto place = [&](int i) -> Place {
    const int32_t row = at.row0 + Coordinates::kRowStep * (i / 2 % 2);
    const int32_t column = at.column0 + i / 4 * 8 + i % 2;
    return {row, column, row < at.rows && column < at.columns};
  };
  sum_again(v, lane, place, [&](int32_t row, int32_t column) {
    const ConstMatrix& a = arguments.a;
    const ConstMatrix& b = arguments.b;
    const auto* weight = static_cast<const float*>(a.data) + row * a.row_stride;
    const auto* x = static_cast<const float*>(b.data) + column * b.row_stride;
    SumAgain sum;
    for (int64_t k = lane; k < arguments.k; k += 32) {
      sum.add(__ldg(weight + k * a.col_stride), __ldg(x + k * b.col_stride));
    }
    return sum.of_warp();
  });
}

/// The program's affine steps: those that were folded ahead, folded(r) of fragment row r, where the
/// warp's rows are plain, else one by one. Then its bounds.
template <class Coordinates, class Folded>
CUTLASS_DEVICE void apply_affine_rows(float (&v)[Coordinates::kSize], const Coordinates& at,
                                      const EpilogueArguments& arguments, const Folded& folded) {
  constexpr int kRows = Coordinates::kRows;
  const auto apply = [&](const auto& step_of) {  // v * x + y
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float2 step = step_of(r);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Coordinates::kSize; ++i) {
        if (i / 2 % kRows == r) v[i] = __fmaf_rn(v[i], step.x, step.y);
      }
    }
  };
  bool plain = arguments.folded != nullptr;
  if (plain) {
    const float2 steps[] = {folded(0), folded(1)};
    plain = __all_sync(0xffffffffu, steps[0].x == steps[0].x && steps[1].x == steps[1].x);
  }
  if (plain) {
    apply(folded);
  } else {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < arguments.affine_steps; ++i) {
      const Step& step = arguments.program.steps[i];
      apply([&](int r) -> float2 {
        float value = step.constants[0];
        if (step.operand >= 0) {
          value = load_column(arguments.program.operands[step.operand], at.row(r));
          if (step.operand == kVarOperand && arguments.normalises) {
            value = normaliser(arguments, value, at.row(r));
          }
        }
        if (step.op == Op::kMul) return {value, -0.f};
        return {1.f, step.op == Op::kSub ? -value : value};
      });
    }
  }
  const float lowest = arguments.exchange.lowest, highest = arguments.exchange.highest;
  if (arguments.partials != nullptr || (lowest == -INFINITY && highest == INFINITY)) return;
  CUTLASS_PRAGMA_UNROLL
  for (float& value : v) value = evaluate<Op::kClamp>(value, lowest, highest);
}

/// As Ended, of what is rounded to 16 bits: 16384x2048-4096-1024 in bf16 took 1 to 2 % less (H200).
/// exp is not corrected for what its factor rounds, 2^-17 of it at most, and may overflow.
template <int kCount>
CUTLASS_DEVICE void end_narrow(float (&v)[kCount], const Ending& ending) {
  const float factor = ending.factor;
  const float term = ending.term;
  CUTLASS_PRAGMA_UNROLL
  for (float& value : v) value = __fmaf_rn(__fdividef(1.f, 1.f + __expf(-value)), factor, term);
}

/// As normalise_together(), of rows; `terms_storage` is the block's, for 128 rows.
template <int kTileM, class Coordinates>
CUTLASS_DEVICE void normalise_rows_together(float (&v)[Coordinates::kSize], const Coordinates& at,
                                            int thread, int tile_row, bool writes,
                                            void* terms_storage,
                                            const EpilogueArguments& arguments) {
  struct Terms {
    float mean[kTileM], scale[kTileM], shift[kTileM];
    int together;
  };
  constexpr int kThreads = kConsumers / kTileM;
  static_assert(kThreads == 2);
  auto& terms = *static_cast<Terms*>(terms_storage);
  const MomentExchange& exchange = arguments.exchange;
  const BatchNormBuffers& bn = exchange.batch_norm;
  const int first_row = tile_row * kTileM;
  const int own = thread / kThreads;
  const int row = min(first_row + own, at.rows - 1);
  // What needs no other block is read and divided before those are waited for.
  const batch_norm::Rows rows(at.columns);
  const batch_norm::Running old =
      writes ? batch_norm::load_running(row, bn) : batch_norm::Running{};
  const auto affine = [&](const void* values, float otherwise) {
    return values != nullptr ? load_value(values, row, bn.affine_dtype) : otherwise;
  };
  const float weight = affine(bn.weight, 1.f);
  const float bias = affine(bn.bias, 0.f);
  meet(exchange, tile_row, thread, &terms.together);
  if (writes && thread == 0 && tile_row == 0 && bn.num_batches_tracked != nullptr) {
    ++*bn.num_batches_tracked;
  }
  const auto [mean, m2] = batch_norm::merge_partials<kThreads>(
      arguments.partials + row * arguments.partial_count, 1,
      static_cast<int>(arguments.partial_count), 8 * Coordinates::kColumnPairs, thread % kThreads,
      rows, at.columns);
  if (thread % kThreads == 0) {
    terms.mean[own] = static_cast<float>(mean);
    terms.scale[own] = weight * batch_norm::inverse_deviation(m2, rows, bn.eps);
    terms.shift[own] = bias;
    if (writes && first_row + own < at.rows) {
      batch_norm::write_statistics(row, mean, m2, rows, old, bn);
    }
  }
  sync_consumers();
  CUTLASS_PRAGMA_UNROLL
  for (int r = 0; r < Coordinates::kRows; ++r) {
    const int n = at.row0 - first_row + r * Coordinates::kRowStep;
    const float mean_of = terms.mean[n], scale = terms.scale[n], shift = terms.shift[n];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Coordinates::kSize; ++i) {
      if (i / 2 % Coordinates::kRows != r) continue;
      const float value = fmaf(v[i] - mean_of, scale, shift);
      v[i] = minimum(maximum(value, exchange.lowest), exchange.highest);
    }
  }
  sync_consumers();  // the next tile's terms lie there
}

/// A warp's boxes of 16-bit values on their way: each of its warpgroup sends one of four.
template <int kTileN>
using TurnedStorage = WarpStorage<kTileN, 4>;

/// Values of 16 bits, of which a warp has 16 features and two neighbours fill boxes of 32 and of 16
/// rows of out. `warps` are the warpgroup's. Calls meanwhile(first, last) with the column pairs
/// that go to shared memory.
template <DType kDType, int kTileN, class Coordinates, class Meanwhile>
CUTLASS_DEVICE void store_turned_boxes(const float (&v)[Coordinates::kSize], const Coordinates& at,
                                       int thread, const CUtensorMap* map,
                                       TurnedStorage<kTileN>* warps, const Meanwhile& meanwhile) {
  constexpr int kRows = Coordinates::kRows;
  using Boxes = uint32_t[2][2][16 * kBoxWords];  // of 32 rows of out, by the warp that sends them
  constexpr int kTurns = 4 * sizeof(warps->boxes) / sizeof(Boxes);
  static_assert(kRows == 2 && Coordinates::kRowStep == 8 && kTileN / 32 % kTurns == 0);
  int lane = thread % 32;
  keep_here(lane);
  auto* turns = reinterpret_cast<Boxes*>(warps);
  const int warp = thread / 32 % 4;
  const int feature = at.row0 - lane / 4 - warp % 2 * 16;  // the first of its boxes
  const int own = swizzled(lane / 16 * 8 + lane % 8, warp % 2 * 8 + lane / 8 % 2 * 4);
  CUTLASS_PRAGMA_UNROLL
  for (int number = 0; number < kTileN / 32; ++number) {
    Boxes& boxes = turns[number % kTurns];
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4];  // of both rows of eight columns, and of the next eight
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int pair = ((4 * number + 2 * half + i / 2) * kRows + i % 2) * 2;
        words[i] = pack_pair(v[pair], v[pair + 1], kDType);
      }
      store_transposed(cute::cast_smem_ptr_to_uint(boxes[half][warp / 2] + own), words);
    }
    meanwhile(4 * number, 4 * number + 4);
    cute::tma_store_fence();
    cute::tma_store_wait<kTurns - 2>();  // of lane 0's: what is filled next has left
    sync_group(thread);
    if (lane == 0) {
      const int row = at.column0 - thread % 4 * 2 + number * 32 + warp % 2 * 16;
      cute::SM90_TMA_STORE_3D::copy(map, boxes[warp % 2][warp / 2], feature, row, 0);
      cute::tma_store_arrive();
    }
  }
}

/// Of a row of out eight neighbouring lanes hold 16 values, two sectors.
template <class Coordinates>
CUTLASS_DEVICE void store_turned(const float (&v)[Coordinates::kSize], const Coordinates& at,
                                 const Matrix& out, bool pairs) {
  constexpr int kRows = Coordinates::kRows;
  constexpr int kPairs = Coordinates::kColumnPairs;
  constexpr int kPairsAtOnce = 8;
  static_assert(kRows == 2 && Coordinates::kRowStep == 1 && kPairs % kPairsAtOnce == 0);
  auto* data = static_cast<float*>(out.data) + at.column0 * out.row_stride + at.row0;
  const bool whole = pairs && at.row_inside(1) && at.column_inside(kPairs - 1, 1);
  // Apart, or the addresses of all columns are kept, and spilled.
  executor::for_each_chunk<true, kPairs / kPairsAtOnce>([&](int chunk) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kPairsAtOnce; ++i) {
      const int j = chunk * kPairsAtOnce + i / 2, c = i % 2;
      auto* to = data + (8 * j + c) * out.row_stride;
      const float first = v[j * kRows * 2 + c];
      const float second = v[(j * kRows + 1) * 2 + c];
      if (whole) {
        *reinterpret_cast<float2*>(to) = {first, second};
      } else if (at.column_inside(j, c)) {
        if (at.row_inside(0)) to[0] = first;
        if (at.row_inside(1)) to[1] = second;
      }
    }
  });
}

}  // namespace cutfuse::gemm::sm90
