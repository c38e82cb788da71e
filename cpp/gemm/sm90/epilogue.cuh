/// \file
/// Epilogue of the sm_90 GEMM on a thread's whole accumulator tile: undo the split's scales, repair
/// non-finite rows and columns, run the program, emit batch-norm partials, store fp32.
///
/// Follows the interface of CUTLASS's operator-style epilogues (DefaultEpilogue), which
/// Sm90TmaWarpSpecializedAdapter turns into a collective: a program step is dispatched once per
/// tile and not once per fragment, as the visitor interface would.
#pragma once

#include <cuda.h>
#include <cutlass/cutlass.h>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/detail.hpp>

#include "cutfuse/split.h"
#include "device/moments.cuh"
#include "gemm/launcher.h"
#include "gemm/sm90/coordinates.cuh"
#include "gemm/sm90/repair.cuh"
#include "program/executor.cuh"

namespace cutfuse::gemm::sm90 {

template <class TileShape>
class ProgramEpilogue {
 public:
  static constexpr int kTileM = cute::size<0>(TileShape{});
  static constexpr int kTileN = cute::size<1>(TileShape{});
  using Coordinates = AccumulatorCoordinates<kTileN>;
  static constexpr int kSize = Coordinates::kSize;
  static constexpr int kPairs = Coordinates::kColumnPairs;

  using ElementC = float;
  using StrideC = cute::Stride<int64_t, cute::_1, int64_t>;
  using ElementD = float;
  using StrideD = StrideC;
  using Arguments = EpilogueArguments;
  struct Params : EpilogueArguments {
    CUtensorMap out_map;      ///< boxes of 16 rows x kBoxColumns, 64-byte swizzle
    bool out_mapped = false;  ///< else stored from registers
  };

  static constexpr int kBoxColumns = 16;
  static constexpr int kBoxes = kTileN > 128 ? 3 : 4;  // in flight per warp; what fits
  static constexpr int kWarps = 8;

  /// A warp's own piece: boxes of the result on their way to memory, then its moments.
  union alignas(1024) WarpStorage {
    float boxes[kBoxes][16 * kBoxColumns];
    Moments moments[kTileN];
  };
  struct SharedStorage {
    WarpStorage warps[kWarps];
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(const ProblemShape&, const Arguments& args, void*) {
    return {args, {}, false};
  }
  template <class ProblemShape>
  static size_t get_workspace_size(const ProblemShape&, const Arguments&) {
    return 0;
  }
  template <class ProblemShape>
  static cutlass::Status initialize_workspace(const ProblemShape&, const Arguments&, void*,
                                              cudaStream_t, cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }
  template <class ProblemShape>
  static bool can_implement(const ProblemShape&, const Arguments&) {
    return true;
  }

  CUTLASS_DEVICE explicit ProgramEpilogue(const Params& params) : params_(params) {}

  template <class ProblemShape, class BlockShape, class BlockCoord, class Engine, class Layout,
            class TiledMma, class Residue>
  CUTLASS_DEVICE void operator()(const ProblemShape& problem, BlockShape, const BlockCoord& block,
                                 cute::Tensor<Engine, Layout>& accumulators, TiledMma, Residue,
                                 int thread, char* shared) {
    static_assert(decltype(cute::size(accumulators))::value == kSize);
    auto& v = *reinterpret_cast<float (*)[kSize]>(&accumulators(0));
    auto& storage = *reinterpret_cast<SharedStorage*>(shared);
    const int warp = thread / 32;  // of the two consumer warpgroups: 16 rows each
    const int lane = thread % 32;
    const Coordinates at{int(cute::get<0>(block)) * kTileM + warp * 16 + lane / 4,
                         int(cute::get<1>(block)) * kTileN + (lane % 4) * 2,
                         int(cute::get<0>(problem)), int(cute::get<1>(problem)),
                         cute::cast_smem_ptr_to_uint(&storage.warps[warp / 4 * 4]) + lane % 4 * 8};
    // The producer waited before its first load; these threads have not read global memory yet.
    cutlass::arch::wait_on_dependent_grids();
    const int row_words[2] = {__ldg(params_.a_words + at.row(0)),
                              __ldg(params_.a_words + at.row(1))};
    stage(at, thread, storage);
    if (unscale(v, row_words, at)) {
      repair(v, at, params_, lane);
    }
    execute(params_.program, v, at);
    sync_group(thread);  // the boxes are free again
    if (params_.out_mapped) {
      store_boxes(v, at, lane, storage.warps[warp]);
    } else {
      store(v, at);
    }
    if (params_.partials != nullptr) {
      store_moments(v, at, thread, storage);
    }
  }

 private:
  const Params& params_;  // in the kernel's constant bank; a copy would go to local memory

  CUTLASS_DEVICE static void sync_group(int thread) {
    cutlass::arch::NamedBarrier::sync(128, 2u + thread / 128);
  }

  /// Copies the tile's piece of B's words and of every per-channel vector into the warpgroup's
  /// boxes, which are empty until the store: the steps then wait for memory once and not one by
  /// one.
  CUTLASS_DEVICE void stage(const Coordinates& at, int thread, SharedStorage& shared) const {
    cute::tma_store_wait<0>();
    sync_group(thread);
    auto* slots = reinterpret_cast<int32_t*>(&shared.warps[thread / 128 * 4]);
    const int first = at.column0 - thread % 4 * 2;
    const DeviceProgram& program = params_.program;
    const int count = min(program.operand_count, Coordinates::kStagedOperands);
    for (int n = thread % 128; n < kTileN; n += 128) {
      const int column = min(first + n, at.columns - 1);
      // All loads of a batch are on their way before the first is stored. Slot 0 is the words'.
      constexpr int kBatch = 8;
      for (int base = 0; base <= count; base += kBatch) {
        float values[kBatch];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kBatch; ++i) {
          const int slot = base + i;
          const Operand& operand = program.operands[max(slot - 1, 0)];
          const bool vector = slot > 0 && slot <= count && operand.row_stride == 0;
          const float* address = vector ? operand.data + column * operand.col_stride
                                        : reinterpret_cast<const float*>(params_.b_words) + column;
          values[i] = slot <= count ? __ldg(address) : 0.f;
        }
        if (base == 0 && params_.normalises) {
          float& value = values[kVarOperand + 1];
          value = 1.f / sqrtf(value + params_.eps);
          if (params_.weight != nullptr) value *= __ldg(params_.weight + column);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kBatch; ++i) {
          if (base + i <= count) slots[(base + i) * kTileN + n] = __float_as_int(values[i]);
        }
      }
    }
    sync_group(thread);
  }

  /// v *= 2^-(row exponent + column exponent). Returns whether a row or a column of the warp's
  /// tile has non-finite inputs.
  CUTLASS_DEVICE bool unscale(float (&v)[kSize], const int (&row_words)[2],
                              const Coordinates& at) const {
    const int row_exponents[2] = {row_exponent(row_words[0]), row_exponent(row_words[1])};
    // While no exponent is beyond +-60 the scale 2^-(a + b) is itself an fp32 number.
    constexpr int kPlain = 60;
    bool nonfinite = row_has_nonfinite(row_words[0]) || row_has_nonfinite(row_words[1]);
    bool plain = abs(row_exponents[0]) <= kPlain && abs(row_exponents[1]) <= kPlain;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kPairs; ++j) {
      const int2 words = at.read_slot(0, j);
      nonfinite |= row_has_nonfinite(words.x) || row_has_nonfinite(words.y);
      plain &= abs(row_exponent(words.x)) <= kPlain && abs(row_exponent(words.y)) <= kPlain;
    }
    if (__all_sync(0xffffffffu, plain)) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kPairs; ++j) {
        const int2 words = at.read_slot(0, j);
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          v[(j * 2 + r) * 2] *= power_of_two(-row_exponents[r] - row_exponent(words.x));
          v[(j * 2 + r) * 2 + 1] *= power_of_two(-row_exponents[r] - row_exponent(words.y));
        }
      }
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kPairs; ++j) {
        const int2 words = at.read_slot(0, j);
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          scale_exactly(v[(j * 2 + r) * 2], row_exponents[r] + row_exponent(words.x));
          scale_exactly(v[(j * 2 + r) * 2 + 1], row_exponents[r] + row_exponent(words.y));
        }
      }
    }
    return __any_sync(0xffffffffu, nonfinite);
  }

  /// 2^e for e in [-126, 127].
  CUTLASS_DEVICE static float power_of_two(int e) { return __int_as_float((127 + e) << 23); }

  /// v *= 2^-e in two exact steps; beyond +-252 the result is 0 or infinite either way.
  CUTLASS_DEVICE static void scale_exactly(float& v, int e) {
    const int clamped = min(max(-e, -252), 252);
    const int first = clamped / 2;
    v = v * power_of_two(first) * power_of_two(clamped - first);
  }

  /// (mean, M2) of each column over the warpgroup's 64 rows -> partials[column][row / 64].
  CUTLASS_DEVICE void store_moments(const float (&v)[kSize], const Coordinates& at, int thread,
                                    SharedStorage& shared) const {
    cute::tma_store_wait<0>();  // the boxes lie where the moments go
    __syncwarp();
    const int group = thread / 128;
    const int warp = thread / 32 % 4;
    const int lane = thread % 32;
    // A lane's 16 columns at a time: their moments take 32 registers beside the values.
    constexpr int kAtOnce = 8;
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < kPairs; first += kAtOnce) {
      const auto& values = *reinterpret_cast<const float (*)[4 * kAtOnce]>(&v[4 * first]);
      Moments columns[kAtOnce / 4];
      reduce_rows<kAtOnce>(values, at.row_inside(0) + at.row_inside(1), lane, columns);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAtOnce / 4; ++i) {
        shared.warps[thread / 32].moments[8 * first + reduced_column<kAtOnce>(lane, i)] =
            columns[i];
      }
    }
    sync_group(thread);
    const int first_row = at.row0 - lane / 4 - warp * 16;
    const int first_column = at.column0 - (lane % 4) * 2;
    for (int n = thread % 128; n < kTileN; n += 128) {
      Moments merged = shared.warps[4 * group].moments[n];
      float count = rows_inside(first_row, at.rows);
      CUTLASS_PRAGMA_UNROLL
      for (int w = 1; w < 4; ++w) {
        const float other = rows_inside(first_row + 16 * w, at.rows);
        merged = merge(merged, count, shared.warps[4 * group + w].moments[n], other);
        count += other;
      }
      if (first_column + n < at.columns && first_row < at.rows) {
        params_.partials[int64_t(first_column + n) * params_.partial_count + first_row / 64] =
            merged;
      }
    }
  }

  CUTLASS_DEVICE static float rows_inside(int first, int rows) {
    return static_cast<float>(min(max(rows - first, 0), 16));
  }

  /// Through shared memory by the copy engine, which goes on while the next tile is multiplied; it
  /// clips at the matrix's bounds.
  CUTLASS_DEVICE void store_boxes(const float (&v)[kSize], const Coordinates& at, int lane,
                                  WarpStorage& storage) const {
    const int row = lane / 4;  // and row + 8
    CUTLASS_PRAGMA_UNROLL
    for (int box = 0; box < kTileN / kBoxColumns; ++box) {
      float* staged = storage.boxes[box % kBoxes];
      cute::tma_store_wait<kBoxes - 1>();  // of lane 0's boxes, the one that was here has left
      __syncwarp();
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int j = 2 * box + half;
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          // 64-byte swizzle: bits 4 and 5 of the address are flipped by bits 7 and 8.
          const int offset = (row + 8 * r) * kBoxColumns + 8 * half + (lane % 4) * 2;
          const int swizzled = offset ^ ((offset >> 5 & 3) << 2);
          *reinterpret_cast<float2*>(staged + swizzled) = {v[(j * 2 + r) * 2],
                                                           v[(j * 2 + r) * 2 + 1]};
        }
      }
      cute::tma_store_fence();
      __syncwarp();
      if (lane == 0) {
        cute::SM90_TMA_STORE_2D::copy(&params_.out_map, staged, at.column0 + box * kBoxColumns,
                                      at.row0);
        cute::tma_store_arrive();
      }
    }
  }

  CUTLASS_DEVICE void store(const float (&v)[kSize], const Coordinates& at) const {
    const bool pairs = params_.out_pairs;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (!at.row_inside(r)) {
        continue;
      }
      float* row =
          params_.out.data + int64_t(at.row0 + 8 * r) * params_.out.row_stride + at.column0;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kPairs; ++j) {
        const float2 pair = {v[(j * 2 + r) * 2], v[(j * 2 + r) * 2 + 1]};
        if (pairs && at.column_inside(j, 1)) {
          *reinterpret_cast<float2*>(row + 8 * j) = pair;
        } else {
          if (at.column_inside(j, 0)) row[8 * j] = pair.x;
          if (at.column_inside(j, 1)) row[8 * j + 1] = pair.y;
        }
      }
    }
  }
};

/// The collective that the kernel layer wants.
template <class TileShape>
class EpilogueCollective
    : public cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<
          ProgramEpilogue<TileShape>> {
  using Base = cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<
      ProgramEpilogue<TileShape>>;

 public:
  using Base::Base;

  /// Shared memory must outlive the last boxes.
  template <class... Pipelines>
  CUTLASS_DEVICE auto store_tail(Pipelines...) {
    cute::tma_store_wait<0>();
    return 0;
  }
};

}  // namespace cutfuse::gemm::sm90
