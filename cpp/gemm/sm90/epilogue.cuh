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

#include "gemm/images.cuh"
#include "gemm/launcher.h"
#include "gemm/repair.cuh"
#include "gemm/sm90/arriving.cuh"
#include "gemm/sm90/coordinates.cuh"
#include "gemm/sm90/exchange.cuh"
#include "gemm/sm90/nchw.cuh"
#include "gemm/sm90/nchw_repair.cuh"
#include "gemm/sm90/partials.cuh"
#include "gemm/sm90/store.cuh"
#include "gemm/sm90/turned.cuh"
#include "gemm/stage.cuh"
#include "gemm/unscale.cuh"
#include "program/executor.cuh"

namespace cutfuse::gemm::sm90 {

template <class TileShape, Source kSource, int kRowStep_>
class ProgramEpilogue {
 public:
  static constexpr int kTileM = cute::size<0>(TileShape{});
  static constexpr int kTileN = cute::size<1>(TileShape{});
  static constexpr bool kNchw = kSource == Source::kNchw;
  static constexpr bool kImages = kSource == Source::kImages || kNchw;
  static constexpr bool kTurned = kSource == Source::kTurned;
  static constexpr int kRowStep = kRowStep_;
  // Slots of planes leave room for fewer operands; those of turned layers are of rows.
  static constexpr int kOperands = kTurned        ? 0
                                   : !kNchw       ? staged_operands(kTileN)
                                   : kTileN == 64 ? 2
                                                  : 7;
  using Fragment = AccumulatorCoordinates<kTileN, kRowStep, kOperands>;
  using Coordinates = std::conditional_t<kImages, ImageCoordinates<Fragment>, Fragment>;
  static constexpr int kSize = Coordinates::kSize;

  using ElementC = float;
  using StrideC = cute::Stride<int64_t, cute::_1, int64_t>;
  using ElementD = float;
  using StrideD = StrideC;
  using Arguments = EpilogueArguments;
  struct Params : EpilogueArguments {
    CUtensorMap out_map;      ///< boxes of 16 rows x 64 bytes, 64-byte swizzle
    bool out_mapped = false;  ///< else stored from registers
    Ending ending;            ///< of the program, that values run as they leave in boxes
    Images images;            ///< that rows are taken from
    ArrivingRows arriving;
  };

  static constexpr int kWarps = 8;
  struct SharedStorage {
    WarpStorage<kTileN> warps[kTurned ? 1 : kWarps];
    Staged<Coordinates, kTileM, kTileN> staged;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(const ProblemShape&, const Arguments& args, void*) {
    return {args, {}, false, {}, {}, {}};
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

  /// Of one warp, once.
  CUTLASS_DEVICE void say_running(int lane) const {
    uint32_t* running = params_.exchange.gathering;
    if (running == nullptr || lane != 0) return;
    cuda::atomic_ref<uint32_t, cuda::thread_scope_device>(*running).fetch_add(
        1, cuda::memory_order_release);
  }

  /// Of one warp: brings to `shared.staged` what the epilogue of `block` needs of memory, once it
  /// is there.
  template <class ProblemShape, class BlockCoord>
  CUTLASS_DEVICE void stage(const ProblemShape& problem, const BlockCoord& block, int lane,
                            SharedStorage& shared) const {
    constexpr int kThreads = cutlass::NumThreadsPerWarp;
    auto& staged = shared.staged;
    const auto all = [](bool mine) { return bool(__all_sync(0xffffffffu, mine)); };
    wait_for_rows<kTileM, kTileN>(params_.arriving, int(cute::get<0>(block)),
                                  int(cute::get<1>(block)), lane);
    const int first_column = int(cute::get<1>(block)) * kTileN;
    const int columns = int(cute::get<1>(problem));
    if constexpr (kTurned) {
      const bool plain =
          stage_words<kTileN>(params_.b_words, first_column, columns, lane, staged.slots);
      if (lane == 0) staged.columns_plain = plain;
      return;
    }
    const int first_row = int(cute::get<0>(block)) * kTileM;
    const int last_row = int(cute::get<0>(problem)) - 1;
    bool rows_plain = true;
    CUTLASS_PRAGMA_UNROLL
    for (int row = lane; row < kTileM; row += kThreads) {
      const int word = params_.a_words != nullptr
                           ? __ldg(params_.a_words + min(first_row + row, last_row))
                           : 2 * params_.a_exponent;
      rows_plain &= is_plain(word);
      staged.row_words[row] = word;
    }
    const bool plain = stage_columns<Coordinates, kTileN, kThreads>(
        params_, first_column, columns, all(rows_plain), lane, staged.slots, all);
    if (lane == 0) staged.columns_plain = plain;
  }

  /// Of the two consumer warpgroups, 16 rows a warp; calls release() once `shared.staged` is read.
  template <class ProblemShape, class BlockCoord, class Engine, class Layout, class Release>
  CUTLASS_DEVICE void finish(const ProblemShape& problem, const BlockCoord& block,
                             cute::Tensor<Engine, Layout>& accumulators, int thread,
                             SharedStorage& storage, const Release& release) {
    static_assert(decltype(cute::size(accumulators))::value == kSize);
    auto& v = *reinterpret_cast<float (*)[kSize]>(&accumulators(0));
    const int lane = thread % 32;
    const int own_row = first_row_of<kRowStep>(thread);
    const Fragment fragment{int(cute::get<0>(block)) * kTileM + own_row,
                            int(cute::get<1>(block)) * kTileN + (lane % 4) * 2,
                            int(cute::get<0>(problem)), int(cute::get<1>(problem)),
                            cute::cast_smem_ptr_to_uint(storage.staged.slots) + lane % 4 * 8};
    const Coordinates at = coordinates(fragment);
    if constexpr (kTurned) {
      finish_turned(block, v, at, thread, storage);
      release();
    } else {
      finish_straight(block, v, at, thread, storage, release);
    }
  }

 private:
  const Params& params_;  // in the kernel's constant bank; a copy would go to local memory

  template <class BlockCoord, class Release>
  CUTLASS_DEVICE void finish_straight(const BlockCoord& block, float (&v)[kSize],
                                      const Coordinates& at, int thread, SharedStorage& storage,
                                      const Release& release) {
    const auto& staged = storage.staged;
    const int warp = thread / 32;
    const int lane = thread % 32;
    const int own_row = first_row_of<kRowStep>(thread);
    const int (&rows)[kTileM] = staged.row_words;
    const int row_words[2] = {rows[own_row], rows[own_row + kRowStep]};
    int step = 0;
    bool folds = staged.columns_plain &&
                 __all_sync(0xffffffffu, is_plain(row_words[0]) && is_plain(row_words[1]));
    // Without the columns' steps folded ahead their words and operands are staged.
    if constexpr (kNchw) folds = folds && (params_.folded != nullptr || are_finite(v));
    if (folds) {
      apply_folded(v, row_words, at, kScaleSlot<Coordinates>);
      step = params_.affine_steps;
      if constexpr (kNchw) {
        if (params_.folded != nullptr && !are_finite(v)) repair_pixels<true>(v, at, params_, lane);
      }
    } else if constexpr (kNchw) {
      if (params_.b_words != nullptr && unscale(v, row_words, at)) mark_columns(v, at);
      repair_pixels<false>(v, at, params_, lane);
    } else {
      if (params_.b_words != nullptr && unscale(v, row_words, at)) repair(v, at, params_, lane);
    }
    auto* group_storage = &storage.warps[warp / 4 * 4];
    execute(params_.program, v, at, step, params_.ending.first);
    release();
    if constexpr (kNchw) {
      store_nchw<kTileN>(v, at, thread, params_.out, group_storage);
    } else {
      store(block, v, at, thread, storage);
    }
  }

  template <class BlockCoord>
  CUTLASS_DEVICE void finish_turned(const BlockCoord& block, float (&v)[kSize],
                                    const Coordinates& at, int thread, SharedStorage& storage) {
    const int lane = thread % 32;
    unscale_turned(v, at, storage.staged.columns_plain, params_, lane);
    apply_affine_rows(v, at, params_);
    if (params_.partials != nullptr) store_turned_moments(v, at, lane, params_);
    if (params_.exchange.arrivals != nullptr) {
      normalise_rows_together<kTileM>(v, at, thread, int(cute::get<0>(block)),
                                      cute::get<1>(block) == 0, storage.warps, params_);
    }
    store_turned(v, at, params_.out, params_.out_pairs);
  }

  template <class BlockCoord>
  CUTLASS_DEVICE void store(const BlockCoord& block, float (&v)[kSize], const Coordinates& at,
                            int thread, SharedStorage& storage) {
    const int warp = thread / 32;
    const int lane = thread % 32;
    auto* group_storage = &storage.warps[warp / 4 * 4];
    const bool exchanges = params_.exchange.arrivals != nullptr;
    // Before the values, whose boxes moments would wait for. Not apart: chunks of values that live
    // on and are selected by a loop would be spilled, and beside 128 values moments are.
    constexpr bool kMomentsFirst = kTileN <= 192;
    if (params_.partials != nullptr && (kMomentsFirst || exchanges)) {
      store_moments<false>(v, at, thread, group_storage, params_.partials,
                           exchanges ? 1 : params_.partial_count, exchanges ? at.columns : 1);
    }
    if (exchanges) {
      normalise_together(v, at, thread, int(cute::get<1>(block)), storage.warps, params_);
    }
    bool to_planes = false;
    if constexpr (kImages) {
      to_planes = params_.images.planes_out;
      if (to_planes) {
        store_nchw<kTileN>(v, at, thread, params_.out, group_storage);
        if (!kMomentsFirst) sync_group(thread);  // moments lie where pixels do
      }
    }
    auto& boxes = storage.warps[warp];
    const auto finishing = [&](const auto& send) {
      if (params_.ending.first < kMaxDeviceSteps) {
        send(Ended{params_.ending});
      } else {
        send(Finished{});
      }
    };
    if (to_planes) {
    } else if (params_.row_partials != nullptr) {
      store_row_partials(v, at, int(cute::get<1>(block)), (at.columns + kTileN - 1) / kTileN,
                         params_.row_partials);
    } else if (params_.out_planes != 0) {
      finishing([&](const auto& finish) {
        store_plane_boxes(v, at, lane, &params_.out_map, params_.out_planes, boxes, finish);
      });
    } else if (!params_.out_mapped) {
      if (params_.out_pairs) {
        store_directly(v, at, params_.out, true);
      } else {
        store_rows(v, at, lane, params_.out, boxes);
      }
    } else if (params_.out.dtype == DType::kFloat32) {
      finishing([&](const auto& finish) {
        store_boxes(v, at, lane, &params_.out_map, int(cute::get<3>(block)), boxes, finish);
      });
    } else {
      finishing([&](const auto& finish) {
        store_narrow_boxes(v, at, lane, &params_.out_map, params_.out.dtype, boxes, finish);
      });
    }
    if (!kMomentsFirst && params_.partials != nullptr && !exchanges) {
      store_moments<true>(v, at, thread, group_storage, params_.partials, params_.partial_count, 1);
    }
  }

  CUTLASS_DEVICE Coordinates coordinates(const Fragment& fragment) const {
    if constexpr (kImages) {
      return {fragment, &params_.images};
    } else {
      return fragment;
    }
  }
};

/// The staged operands change hands by named barriers: to each consumer warpgroup by one of its
/// own, from both to the producer's epilogue warp, the stager, by one. By an mbarrier instead it
/// was 1.0 to 1.5 us a tile slower for what is staged and 4 % of everything for what is read; H200.
struct Staging {
  static constexpr int kGroups = 2;
  static constexpr int kStager = cutlass::NumThreadsPerWarp;
  static constexpr int kGroup = cutlass::NumThreadsPerWarpGroup;
  static constexpr uint32_t kStaged = 4;
  static constexpr uint32_t kRead = kStaged + kGroups;

  CUTLASS_DEVICE static void say_staged() {
    for (int group = 0; group < kGroups; ++group) {
      cutlass::arch::NamedBarrier::arrive(kStager + kGroup, kStaged + group);
    }
  }
  CUTLASS_DEVICE static void wait_until_staged(int group) {
    cutlass::arch::NamedBarrier::sync(kStager + kGroup, kStaged + group);
  }
  CUTLASS_DEVICE static void say_read() {
    cutlass::arch::NamedBarrier::arrive(kStager + kGroups * kGroup, kRead);
  }
  CUTLASS_DEVICE static void wait_until_read() {
    cutlass::arch::NamedBarrier::sync(kStager + kGroups * kGroup, kRead);
  }
};

/// The collective that the kernel layer wants: the producer's epilogue warp stages operands while
/// the tile is multiplied.
template <class TileShape, Source kSource, int kRowStep>
class EpilogueCollective
    : public cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<
          ProgramEpilogue<TileShape, kSource, kRowStep>> {
  using Base = cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<
      ProgramEpilogue<TileShape, kSource, kRowStep>>;

 public:
  using Base::Base;
  using typename Base::StorePipeline;
  using typename Base::StorePipelineState;
  using typename Base::TensorStorage;
  using LoadPipeline = cutlass::PipelineAsync<1>;  // its state counts the tiles staged
  using LoadPipelineState = typename LoadPipeline::PipelineState;
  using PipelineStorage = typename LoadPipeline::SharedStorage;

  CUTLASS_DEVICE bool is_producer_load_needed() const { return true; }

  template <class ProblemShape, class BlockShape, class BlockCoord, class TiledMma>
  CUTLASS_DEVICE auto load(LoadPipeline, LoadPipelineState state, const ProblemShape& problem,
                           BlockShape, const BlockCoord& block, TiledMma, int lane,
                           TensorStorage& storage, int) {
    if (state.count() > 0) {
      Staging::wait_until_read();
    } else {
      Base::say_running(lane);
    }
    Base::stage(problem, block, lane, storage);
    Staging::say_staged();
    ++state;
    return state;
  }

  CUTLASS_DEVICE auto load_tail(LoadPipeline, LoadPipelineState state) {
    if (state.count() > 0) Staging::wait_until_read();
    return state;
  }

  template <class ProblemShape, class BlockShape, class BlockCoord, class Engine, class Layout,
            class TiledMma>
  CUTLASS_DEVICE auto store(LoadPipeline, LoadPipelineState state, StorePipeline,
                            StorePipelineState stored, const ProblemShape& problem, BlockShape,
                            const BlockCoord& block, cute::Tensor<Engine, Layout>& accumulators,
                            TiledMma, int thread, TensorStorage& storage, int) {
    const int group = thread / cutlass::NumThreadsPerWarpGroup;
    Staging::wait_until_staged(group);
    // The warp that staged had waited for the kernels before this one.
    Base::finish(problem, block, accumulators, thread, storage, [] { Staging::say_read(); });
    return cute::make_tuple(state, stored);
  }

  /// Shared memory must outlive the last boxes.
  template <class... Pipelines>
  CUTLASS_DEVICE auto store_tail(Pipelines...) {
    cute::tma_store_wait<0>();
    return 0;
  }
};

}  // namespace cutfuse::gemm::sm90
