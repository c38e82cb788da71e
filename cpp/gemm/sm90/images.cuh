/// \file
/// The GEMM on images: A's tiles come by the copy engine's im2col mode, which gathers them from
/// pixels whose channels lie side by side. All else is the mainloop of matrices.
#pragma once

#include <cutlass/cutlass.h>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "gemm/images.h"
#include "gemm/sm90/mainloop.cuh"

namespace cutfuse::gemm::sm90 {

/// `Base` with A from images. The map in tma_load_a is one of images; the launcher puts it there.
template <class Base>
struct WithImages : Base {
  struct Arguments : Base::Arguments {
    Images images;
  };
  struct Params : Base::Params {
    Images images;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(const ProblemShape& problem, const Arguments& args,
                                        void* workspace) {
    Params params;
    static_cast<typename Base::Params&>(params) =
        Base::to_underlying_arguments(problem, args, workspace);
    params.images = args.images;
    return params;
  }
};

/// [plane][image] is the map's outermost dimension.
template <class Base>
struct ImageMainloop : WithImages<Base> {
  using typename Base::MainloopPipeline;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;
  using typename WithImages<Base>::Params;
  static_assert(kTapAlignment == kTileK);

  /// As that of CUTLASS's collective.
  template <class Inputs, class BlockCoord, class KTiles>
  CUTLASS_DEVICE void load(const Params& params, MainloopPipeline pipeline, PipelineState write,
                           const Inputs& inputs, const BlockCoord& block, KTiles k_tiles, int count,
                           int, uint32_t rank, TensorStorage& shared) const {
    using namespace cute;
    if (params.waits) wait_for_previous_kernels();
    if (!cute::elect_one_sync()) return;
    using Cluster = typename Base::DispatchPolicy::ClusterShape;
    static_assert(size<1>(Cluster{}) == 1, "A's tiles are a block's own");
    const auto [m, n, k, part] = block;
    Tensor sA = make_tensor(make_smem_ptr(shared.smem_A.data()), typename Base::SmemLayoutA{});
    Tensor sB = make_tensor(make_smem_ptr(shared.smem_B.data()), typename Base::SmemLayoutB{});
    const auto block_b = params.tma_load_b.get_slice(rank);
    Tensor from_b = block_b.partition_S(get<1>(inputs)(_, _, n, _, part));
    Tensor to_b = block_b.partition_D(sB);
    const auto everyone = static_cast<uint16_t>((1u << size<0>(Cluster{})) - 1);

    const Images& images = params.images;
    constexpr int kTileM = size<0>(typename Base::TileShape{});
    const FirstTap first = first_tap(images, int(m) * kTileM);
    int plane = 0, channel = 0, r = 0, s = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (; count > 0; --count) {
      pipeline.producer_acquire(write);
      auto* barrier = pipeline.producer_get_barrier(write);
      cute::SM90_TMA_LOAD_IM2COL_4D::copy(
          params.tma_load_a.get_tma_descriptor(), reinterpret_cast<uint64_t*>(barrier),
          raw_pointer_cast(&sA(0, 0, write.index())), channel, first.w, first.h,
          plane * images.count + first.image, static_cast<uint16_t>(s * images.dilation_w),
          static_cast<uint16_t>(r * images.dilation_h));
      copy(params.tma_load_b.with(*barrier, everyone), from_b(_, _, _, *k_tiles),
           to_b(_, _, _, write.index()));
      ++k_tiles;
      ++write;
      if (++plane < Base::kPlaneCount) continue;
      plane = 0;
      channel += kTileK;
      if (channel < images.channels) continue;
      channel = 0;
      if (++s < images.kernel_w) continue;
      s = 0;
      ++r;
    }
  }
};

}  // namespace cutfuse::gemm::sm90
