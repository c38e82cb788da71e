/// \file
/// Epilogue of the sm_90 GEMM on a thread's whole accumulator tile: undo the split's scales, repair
/// non-finite rows and columns, run the program, store the result and its reductions' partials.
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

#include "gemm/launcher.h"
#include "gemm/repair.cuh"
#include "gemm/sm90/coordinates.cuh"
#include "gemm/sm90/partials.cuh"
#include "gemm/sm90/store.cuh"
#include "gemm/stage.cuh"
#include "gemm/unscale.cuh"
#include "program/executor.cuh"

namespace cutfuse::gemm::sm90 {

template <class TileShape>
class ProgramEpilogue {
 public:
  static constexpr int kTileM = cute::size<0>(TileShape{});
  static constexpr int kTileN = cute::size<1>(TileShape{});
  using Coordinates = AccumulatorCoordinates<kTileN>;
  static constexpr int kSize = Coordinates::kSize;

  using ElementC = float;
  using StrideC = cute::Stride<int64_t, cute::_1, int64_t>;
  using ElementD = float;
  using StrideD = StrideC;
  using Arguments = EpilogueArguments;
  struct Params : EpilogueArguments {
    CUtensorMap out_map;      ///< boxes of 16 rows x 64 bytes, 64-byte swizzle
    bool out_mapped = false;  ///< else stored from registers
  };

  static constexpr int kWarps = 8;
  struct SharedStorage {
    WarpStorage<kTileN> warps[kWarps];
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
    int row_words[2];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      row_words[r] =
          params_.a_words != nullptr ? __ldg(params_.a_words + at.row(r)) : 2 * params_.a_exponent;
    }
    const bool columns_plain = stage(at, thread, storage);
    if (columns_plain &&
        __all_sync(0xffffffffu, is_plain(row_words[0]) && is_plain(row_words[1]))) {
      apply_folded(v, row_words, at, staged_count<Coordinates>(params_) + 1);
      execute(params_.program, v, at, params_.affine_steps);
    } else {
      if (params_.b_words != nullptr && unscale(v, row_words, at)) {
        repair(v, at, params_, lane);
      }
      execute(params_.program, v, at);
    }
    sync_group(thread);  // the boxes are free again
    auto& boxes = storage.warps[warp];
    if (params_.row_partials != nullptr) {
      store_row_partials(v, at, int(cute::get<1>(block)), (at.columns + kTileN - 1) / kTileN,
                         params_.row_partials);
    } else if (params_.out_planes != 0) {
      store_plane_boxes(v, at, lane, &params_.out_map, params_.out_planes, boxes);
    } else if (!params_.out_mapped) {
      if (params_.out_pairs) {
        store_directly(v, at, params_.out, true);
      } else {
        store_rows(v, at, lane, params_.out, boxes);
      }
    } else if (params_.out.dtype == DType::kFloat32) {
      store_boxes(v, at, lane, &params_.out_map, int(cute::get<3>(block)), boxes);
    } else {
      store_narrow_boxes(v, at, lane, &params_.out_map, params_.out.dtype, boxes);
    }
    if (params_.partials != nullptr) {
      store_moments(v, at, thread, &storage.warps[warp / 4 * 4], params_.partials,
                    params_.partial_count);
    }
  }

 private:
  const Params& params_;  // in the kernel's constant bank; a copy would go to local memory

  /// Into the warpgroup's boxes, which are empty until the store. Returns whether every column's
  /// scale and shift are plain.
  CUTLASS_DEVICE bool stage(const Coordinates& at, int thread, SharedStorage& shared) const {
    constexpr int kThreads = 128;
    cute::tma_store_wait<0>();
    sync_group(thread);
    auto* slots = reinterpret_cast<int32_t*>(&shared.warps[thread / kThreads * 4]);
    const bool plain = stage_operands<Coordinates, kTileN, kThreads>(
        params_, at.column0 - thread % 4 * 2, at.columns, thread % kThreads, slots);
    return sync_all(plain, 2u + thread / kThreads, kThreads);
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
