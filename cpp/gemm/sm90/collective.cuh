/// \file
/// The epilogue as a collective of CUTLASS's warp-specialized kernel.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>
#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/detail.hpp>

#include "gemm/sm90/epilogue.cuh"

namespace cutfuse::gemm::sm90 {

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
template <class TileShape, Source kSource, int kRowStep, DType kElement>
class EpilogueCollective
    : public cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<
          ProgramEpilogue<TileShape, kSource, kRowStep, kElement>> {
  using Base = cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<
      ProgramEpilogue<TileShape, kSource, kRowStep, kElement>>;

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
