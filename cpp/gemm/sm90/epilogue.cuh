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
#include "gemm/sm90/turned_partials.cuh"
#include "gemm/stage.cuh"
#include "gemm/unscale.cuh"
#include "program/executor.cuh"

namespace cutfuse::gemm::sm90 {

/// What values that leave in boxes need when all of their columns are plain: affine steps and what
/// follows them. They are done while the boxes before are read, which is what a tile waits for.
enum class Leaving { kNot, kFolded, kBounded, kEnded };

/// kElement: of what is multiplied; bf16 are tensors and never planes, whose rows have words.
template <class TileShape, Source kSource, int kRowStep_, DType kElement>
class ProgramEpilogue {
 public:
  static constexpr bool kScaledRows = kElement != DType::kBFloat16;
  static constexpr int kTileM = cute::size<0>(TileShape{});
  static constexpr int kTileN = cute::size<1>(TileShape{});
  static constexpr bool kNchw = kSource == Source::kNchw;
  static constexpr bool kImages = kSource == Source::kImages || kNchw;
  static constexpr bool kTurned = kSource == Source::kTurned;
  static constexpr bool kRounded = kTurned && kElement == DType::kFloat32;  // on their way
  static constexpr bool kHasRows = kTurned && !kRounded;                    // features are
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
    CUtensorMap out_map;             ///< boxes of 16 rows x 64 bytes, 64-byte swizzle
    bool out_mapped = false;         ///< else stored from registers
    bool only_boxes = false;         ///< nothing is done to results but to store them in boxes
    bool boxes_and_moments = false;  ///< but that, and to take batch norm's moments of them
    Leaving leaving = Leaving::kNot;
    float lowest = 0.f, highest = 0.f;  ///< of Leaving::kBounded
    Ending ending;                      ///< of the program, that values run as they leave in boxes
    Images images;                      ///< that rows are taken from
    ArrivingRows arriving;
  };

  static constexpr int kWarps = 8;
  struct StagedRows {
    int32_t slots[2 * kTileM];  // scales and shifts
  };
  struct SharedStorage {
    std::conditional_t<kHasRows, TurnedStorage<kTileN>, WarpStorage<kTileN>>
        warps[kRounded ? 1 : kWarps];
    std::conditional_t<kHasRows, StagedRows, Staged<Coordinates, kTileM, kTileN>> staged;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(const ProblemShape&, const Arguments& args, void*) {
    Params params;
    static_cast<EpilogueArguments&>(params) = args;
    return params;
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
    wait_for_rows<kTileM, kTileN>(params_.arriving, int(cute::get<0>(block)),
                                  int(cute::get<1>(block)), lane);
    const int first_row = int(cute::get<0>(block)) * kTileM;
    const int first_column = int(cute::get<1>(block)) * kTileN;
    const int last_row = int(cute::get<0>(problem)) - 1;
    const int columns = int(cute::get<1>(problem));
    auto& staged = shared.staged;
    if constexpr (kRounded) {
      const bool plain =
          stage_words<kTileN>(params_.b_words, first_column, columns, lane, staged.slots);
      if (lane == 0) staged.columns_plain = plain;
    } else if constexpr (kTurned) {
      auto* folded = reinterpret_cast<float2*>(staged.slots);
      CUTLASS_PRAGMA_UNROLL
      for (int row = lane; params_.folded != nullptr && row < kTileM; row += kThreads) {
        folded[row] = __ldg(params_.folded + min(first_row + row, last_row));
      }
    } else {
      const auto all = [](bool mine) { return bool(__all_sync(0xffffffffu, mine)); };
      bool rows_plain = true;
      CUTLASS_PRAGMA_UNROLL
      for (int row = lane; kScaledRows && row < kTileM; row += kThreads) {
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
    const int row_words[2] = {kScaledRows ? rows[own_row] : 0,
                              kScaledRows ? rows[own_row + kRowStep] : 0};
    int step = 0;
    bool folds = staged.columns_plain;
    if constexpr (kScaledRows) {
      folds = folds && __all_sync(0xffffffffu, is_plain(row_words[0]) && is_plain(row_words[1]));
    }
    // Without the columns' steps folded ahead their words and operands are staged.
    if constexpr (kNchw) folds = folds && (params_.folded != nullptr || are_finite(v));
    if constexpr (!kNchw) {
      if (folds && params_.leaving != Leaving::kNot) {
        leave(block, v, row_words, at, thread, storage, release);
        return;
      }
    }
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
    if (step < min(params_.program.count, params_.ending.first)) {
      execute(params_.program, v, at, step, params_.ending.first);
    }
    release();
    if constexpr (kNchw) {
      store_nchw<kTileN>(v, at, thread, params_.out, group_storage);
    } else {
      store(block, v, at, thread, storage);
    }
  }

  template <class BlockCoord, class Release>
  CUTLASS_DEVICE void leave(const BlockCoord& block, float (&v)[kSize], const int (&row_words)[2],
                            const Coordinates& at, int thread, SharedStorage& storage,
                            const Release& release) {
    const int lane = thread % 32;
    auto& boxes = storage.warps[thread / 32];
    const float rows[2] = {power_of_two(-row_exponent(row_words[0])),
                           power_of_two(-row_exponent(row_words[1]))};
    const auto folded = [&](const auto& then) {
      return Folded<Coordinates, kScaledRows, std::decay_t<decltype(then)>>{at, rows, then};
    };
    if (params_.leaving == Leaving::kEnded) {
      store_values(block, v, at, lane, boxes, folded(Ended{params_.ending}));
    } else if (params_.leaving == Leaving::kBounded) {
      store_values(block, v, at, lane, boxes, folded(Bounded{params_.lowest, params_.highest}));
    } else {
      store_values(block, v, at, lane, boxes, folded(Finished{}));
    }
    release();
  }

  template <class BlockCoord>
  CUTLASS_DEVICE void finish_turned(const BlockCoord& block, float (&v)[kSize],
                                    const Coordinates& at, int thread, SharedStorage& storage) {
    const int lane = thread % 32;
    const int tile_row = int(cute::get<0>(block));
    if constexpr (kRounded) {
      unscale_turned(v, at, storage.staged.columns_plain, params_, lane);
      apply_affine_rows(v, at, params_, [&](int r) { return __ldg(params_.folded + at.row(r)); });
    } else {
      const auto* folded = reinterpret_cast<const float2*>(storage.staged.slots);
      const int own_row = first_row_of<kRowStep>(thread);
      apply_affine_rows(v, at, params_, [&](int r) { return folded[own_row + r * kRowStep]; });
      if (params_.ending.first < kMaxDeviceSteps) end_narrow(v, params_.ending);
      if (params_.row_partials != nullptr) {
        store_turned_row_partials<kTileM, kTileN>(v, at, thread, tile_row, storage.warps,
                                                  params_.row_partials);
        return;
      }
    }
    const bool exchanges = params_.exchange.arrivals != nullptr;
    if (params_.partials != nullptr) {
      if (kRounded || exchanges) {
        store_turned_moments<true>(v, at, lane, params_);
      } else if constexpr (!kRounded) {
        store_turned_boxes_with_moments<kElement, kTileN>(
            v, at, thread, &params_.out_map, &storage.warps[thread / 128 * 4], params_);
        return;
      }
    }
    if (exchanges) {
      cute::tma_store_wait<0>();  // boxes lie where the terms go
      normalise_rows_together<kTileM>(v, at, thread, tile_row, cute::get<1>(block) == 0,
                                      storage.warps, params_);
    }
    if constexpr (kRounded) {
      store_turned(v, at, params_.out, params_.out_pairs);
    } else {
      store_turned_boxes<kElement>(v, at, thread, &params_.out_map,
                                   &storage.warps[thread / 128 * 4], [](int, int) {});
    }
  }

  template <class BlockCoord>
  CUTLASS_DEVICE void store(const BlockCoord& block, float (&v)[kSize], const Coordinates& at,
                            int thread, SharedStorage& storage) {
    const int warp = thread / 32;
    const int lane = thread % 32;
    auto* group_storage = &storage.warps[warp / 4 * 4];
    auto& boxes = storage.warps[warp];
    const bool exchanges = params_.exchange.arrivals != nullptr;
    const bool ends = params_.ending.first < kMaxDeviceSteps;
    // One jump over all that is rare: each costs a wait for the code behind it.
    if (!params_.only_boxes) {
      if (params_.boxes_and_moments) {
        store_with_moments(v, at, thread, group_storage);
        return;
      }
      if (params_.partials != nullptr) {
        store_moments(v, at, thread, group_storage, params_.partials,
                      exchanges ? 1 : params_.partial_count, exchanges ? at.columns : 1);
      }
      if (exchanges) {
        normalise_together(v, at, thread, int(cute::get<1>(block)), storage.warps, params_);
      }
      if constexpr (kImages) {
        if (params_.images.planes_out) {
          store_nchw<kTileN>(v, at, thread, params_.out, group_storage);
          return;
        }
      }
      if (params_.row_partials != nullptr) {
        store_row_partials(v, at, int(cute::get<1>(block)), (at.columns + kTileN - 1) / kTileN,
                           params_.row_partials);
        return;
      }
      if (params_.out_planes != 0) {
        const auto send = [&](const auto& finish) {
          store_plane_boxes(v, at, lane, &params_.out_map, params_.out_planes, boxes, finish);
        };
        if (ends) {
          send(Ended{params_.ending});
        } else {
          send(Finished{});
        }
        return;
      }
      if (!params_.out_mapped) {
        if (params_.out_pairs) {
          store_directly(v, at, params_.out, true);
        } else {
          store_rows(v, at, lane, params_.out, boxes);
        }
        return;
      }
    }
    if (ends) {
      store_values(block, v, at, lane, boxes, Ended{params_.ending});
    } else {
      store_values(block, v, at, lane, boxes, Finished{});
    }
  }

  /// Of 16 bits.
  CUTLASS_DEVICE void store_with_moments(float (&v)[kSize], const Coordinates& at, int thread,
                                         WarpStorage<kTileN>* warps) {
    const auto store = [&](auto dtype) {
      store_boxes_with_moments<kTileN, decltype(dtype)::value>(
          v, at, thread, &params_.out_map, warps, params_.partials, params_.partial_count);
    };
    if (params_.out.dtype == DType::kFloat16) {
      store(std::integral_constant<DType, DType::kFloat16>{});
    } else {
      store(std::integral_constant<DType, DType::kBFloat16>{});
    }
  }

  /// In boxes of the result's dtype.
  template <class BlockCoord, class Finish>
  CUTLASS_DEVICE void store_values(const BlockCoord& block, float (&v)[kSize],
                                   const Coordinates& at, int lane, WarpStorage<kTileN>& boxes,
                                   const Finish& finish) {
    if (params_.out.dtype == DType::kFloat32) {
      store_boxes(v, at, lane, &params_.out_map, int(cute::get<3>(block)), boxes, finish);
    } else {
      store_narrow_boxes(v, at, lane, &params_.out_map, params_.out.dtype, boxes, finish);
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

}  // namespace cutfuse::gemm::sm90
