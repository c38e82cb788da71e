/// \file
/// Mainloops of the GEMM, composed of CUTLASS's sm_90 TMA + wgmma collective: tensor maps, shared
/// layouts and the producer are inherited. PlainMainloop multiplies tensors or single planes.
///
/// SplitMainloop is the fp32-accurate one: fp16 products of two-plane operands, promoted from the
/// tensor core's accumulator to a second fp32 register set as they come. The planes of an operand
/// are the batch mode of its tensor map, and the k mode that the kernel iterates is
/// (plane, k-tile), plane first, so that pipeline slots alternate hi, lo of one k-tile and the
/// CUTLASS kernel layer is unchanged. The kernel is told K' = 2 * ceil(K / 64) * 64.
///
/// Why promotion: the tensor core's accumulator truncates; over a long K the error grows to 1e-5.
/// Promotion's own fp32 roundings grow with sqrt(K): where registers allow a third set (tiles of
/// 128 columns), sums of 16 k-tiles are added to it, which divides that error by 3 at K = 8192.
/// For small K PyTorch's own error is so small that single truncations show: promote_k = 16 adds
/// the fourth product, promotes after every instruction of the large one and flushes every 2
/// k-tiles. Source of the split: Ootomo and Yokota, "Recovering single precision accuracy from
/// Tensor Cores", IJHPCA 2022. Source of the promotion: DeepSeek-V3 technical report,
/// section 3.3.2.
///
/// Truncation takes 1.53 (uniform data) to 1.85 (lognormal) times 2^-23 off a k-tile's sum on
/// average, measured for K = 128 ... 16384 on an H200: the multiplication in a promotion puts back
/// 1, 2, 2, ... times 2^-23.
///
/// A tile's epilogue is not overlapped with the next one's products, although the third set would
/// hold it: one warpgroup alone keeps the tensor cores about 55 % busy (m64n128k16), two 99 %, so
/// that a piece of it after each promotion was 4 % slower (16384x4096x2048; H200).
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>
#include <cute/tensor.hpp>
// Not collective_builder.hpp: the builders of all architectures take 5 s more to parse.
#include <cutlass/gemm/collective/builders/sm90_gmma_builder.inl>
#include <cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp>

#include "gemm/sm90/arriving.cuh"

namespace cutfuse::gemm::sm90 {

inline constexpr int kTileK = 64;  // of 16-bit elements

template <class Element, class TileShape, class ClusterShape, int kStages>
using BaseMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cutlass::layout::RowMajor,
    16 / sizeof(Element), Element, cutlass::layout::ColumnMajor, 16 / sizeof(Element), float,
    TileShape, ClusterShape, cutlass::gemm::collective::StageCount<kStages>,
    cutlass::gemm::KernelTmaWarpSpecializedCooperative>::CollectiveOp;

/// CUTLASS's collective over kPlanes planes of each operand and `parts` parts of K, which the
/// kernel sees as its batch mode. The planes are the batch mode of the tensor maps.
template <class Element, class TileShape, class ClusterShape, int kStages, int kPlanes>
struct PlainMainloop : BaseMainloop<Element, TileShape, ClusterShape, kStages> {
  using Base = BaseMainloop<Element, TileShape, ClusterShape, kStages>;
  static constexpr int kPlaneCount = kPlanes;
  static constexpr int kSlotK = cute::size<2>(TileShape{});

  struct Arguments {
    typename Base::Arguments planes;  ///< pointers and strides; the batch mode strides over planes
    int m = 0, n = 0, k = 0;
    int parts = 1;
  };

  struct Params : Base::Params {
    int k = 0;
    int parts = 1;
    float promotion = 1.f;   ///< factor of every third k-tile
    float promotion2 = 1.f;  ///< and of the others, 2 * promotion - 1
    bool waits = true;       ///< for the kernels before, with what is loaded
    ArrivingRows arriving;
  };

  static int tiles_of_part(int k, int parts) {
    const int tiles = (k + kSlotK - 1) / kSlotK;
    return (tiles + parts - 1) / parts;
  }

  /// K as the kernel is told: pipeline slots of one part times the slot's K.
  static int kernel_k(int k, int parts) { return kPlanes * tiles_of_part(k, parts) * kSlotK; }

  template <class ProblemShape>
  static Params to_underlying_arguments(const ProblemShape&, const Arguments& args,
                                        void* workspace) {
    const auto shape = cute::make_shape(args.m, args.n, args.k, kPlanes);
    Params params;
    static_cast<typename Base::Params&>(params) =
        Base::to_underlying_arguments(shape, args.planes, workspace);
    params.k = args.k;
    params.parts = args.parts;
    return params;
  }

  template <class ProblemShape>
  static bool can_implement(const ProblemShape&, const Arguments& args) {
    // The k extent of the maps may be any number; strides are multiples of 16 bytes by contract.
    return args.m > 0 && args.n > 0 && args.k > 0;
  }

  /// Tiles of A and B with the k mode (plane, k-tile): (BLK_M, BLK_K, m, (plane, k), part). Tiles
  /// past the end of K are zeros.
  template <class ProblemShapeMNKL>
  CUTLASS_DEVICE auto load_init(const ProblemShapeMNKL& problem, const Params& params) const {
    using namespace cute;
    const auto shape = make_shape(get<0>(problem), get<1>(problem), params.k, cute::Int<kPlanes>{});
    auto [gA, gB] = Base::load_init(shape, params);
    const int tiles = get<2>(problem) / (kPlanes * kSlotK);
    const auto sliced = [&](const auto& all) {
      const auto layout = all.layout();
      const auto k_tiles = make_layout(tiles, stride<3>(layout));
      const auto parts = make_layout(params.parts, tiles * stride<3>(layout));
      const auto of_k = [&] {
        if constexpr (kPlanes == 1) {
          return k_tiles;
        } else {
          return make_layout(get<4>(layout), k_tiles);
        }
      }();
      return make_tensor(all.data(),
                         make_layout(get<0>(layout), get<1>(layout), get<2>(layout), of_k, parts));
    };
    return make_tuple(sliced(gA), sliced(gB));
  }

  template <class Inputs, class BlockCoord, class KTiles>
  CUTLASS_DEVICE void load(const Params& params, typename Base::MainloopPipeline pipeline,
                           typename Base::PipelineState write, const Inputs& inputs,
                           const BlockCoord& block, KTiles k_tiles, int count, int lane,
                           uint32_t rank, typename Base::TensorStorage& shared) {
    if (params.waits) {
      wait_for_rows<cute::size<0>(TileShape{}), cute::size<1>(TileShape{})>(
          params.arriving, int(cute::get<0>(block)), int(cute::get<1>(block)), lane);
    }
    Base::load(params, pipeline, write, inputs, block, k_tiles, count, lane, rank, shared);
  }
};

/// The two consumer warpgroups issue in turns, so that one promotes while the other multiplies
/// (without turns they fall into step: 15 % slower at cluster 1x1, up to 4 % at 2x1; H200).
struct Turns {
  static constexpr int kThreads = 2 * cutlass::NumThreadsPerWarpGroup;
  int group;

  CUTLASS_DEVICE explicit Turns(int group_) : group(group_) {
    if (group == 1) {
      cutlass::arch::NamedBarrier::arrive(kThreads, 0u);
    }
  }
  CUTLASS_DEVICE void wait() const {
    cutlass::arch::NamedBarrier::sync(kThreads, static_cast<uint32_t>(group));
  }
  CUTLASS_DEVICE void pass(bool last) const {
    // The second group's last turn has no successor: an arrival would open the next tile early,
    // which is 2 to 5 % slower (1024x8192x8192, 16384x4096x2048; H200).
    if (group == 0 || !last) {
      cutlass::arch::NamedBarrier::arrive(kThreads, static_cast<uint32_t>(1 - group));
    }
  }
};

template <class TileShape, class ClusterShape, int kStages, int kPromoteK>
struct SplitMainloop : PlainMainloop<cutlass::half_t, TileShape, ClusterShape, kStages, 2> {
  using Base = PlainMainloop<cutlass::half_t, TileShape, ClusterShape, kStages, 2>;
  using typename Base::MainloopPipeline;
  using typename Base::Params;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;
  using typename Base::TiledMma;

  /// The consumers' side; k_tile_count counts slots: two per k-tile.
  template <class FrgTensorC>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState read, FrgTensorC& accum,
                          int k_tile_count, int thread_idx, TensorStorage& shared,
                          const Params& params) {
    using namespace cute;
    Tensor sA = make_tensor(make_smem_ptr(shared.smem_A.data()), typename Base::SmemLayoutA{});
    Tensor sB = make_tensor(make_smem_ptr(shared.smem_B.data()), typename Base::SmemLayoutB{});

    // The index must be warp-uniform for the descriptors to stay in uniform registers.
    const int group = __shfl_sync(0xffffffffu, thread_idx / cutlass::NumThreadsPerWarpGroup, 0);
    TiledMma tiled_mma;
    auto thread_mma = tiled_mma.get_slice(group * cutlass::NumThreadsPerWarpGroup);
    Tensor rA = thread_mma.make_fragment_A(thread_mma.partition_A(sA));  // (MMA, M, K, slot)
    Tensor rB = thread_mma.make_fragment_B(thread_mma.partition_B(sB));
    Tensor partial = make_fragment_like(accum);
    clear(accum);

    const auto multiply = [&](int k, int slot_a, int slot_b) {
      cute::gemm(tiled_mma, rA(_, _, k, slot_a), rB(_, _, k, slot_b), partial);
      tiled_mma.accumulate_ = GMMA::ScaleOut::One;
    };
    const auto multiply_tile = [&](int slot_a, int slot_b) {
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < size<2>(rA); ++k) multiply(k, slot_a, slot_b);
    };
    const auto begin = [&] {
      warpgroup_fence_operand(partial);
      warpgroup_arrive();
      tiled_mma.accumulate_ = GMMA::ScaleOut::Zero;
    };

    const Turns turns(group);
    constexpr bool kBlocked = size<1>(TileShape{}) <= 128;
    constexpr int kFlushTiles = kPromoteK == kTileK ? 16 : 2;
    auto sum = [&] {  // of the k-tiles since the last flush, or of all
      if constexpr (kBlocked) {
        return make_fragment_like(accum);
      } else {
        return make_tensor(accum.data(), accum.layout());
      }
    }();
    clear(sum);
    const auto promote = [&](float factor) {
      warpgroup_fence_operand(partial);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(sum); ++i) sum(i) = __fmaf_rn(partial(i), factor, sum(i));
    };

    for (int tiles = k_tile_count / 2; tiles > 0; --tiles) {
      PipelineState low = read;
      ++low;
      pipeline.consumer_wait(read);
      pipeline.consumer_wait(low);
      const int hi = read.index();
      const int lo = low.index();

      turns.wait();
      begin();
      // Small products first: the accumulator truncates at the size of what it already holds.
      if constexpr (kPromoteK == kTileK) {
        multiply_tile(lo, hi);
        multiply_tile(hi, lo);
        warpgroup_commit_batch();
        multiply_tile(hi, hi);
        warpgroup_commit_batch();
        turns.pass(tiles == 1);
        warpgroup_wait<1>();
        pipeline.consumer_release(low);
        warpgroup_wait<0>();
        pipeline.consumer_release(read);
        // Branches, so that the factor is a uniform operand and not a register (1 %).
        if (tiles % 3 == 0) {
          promote(params.promotion);
        } else {
          promote(params.promotion2);
        }
      } else {
        multiply_tile(lo, lo);
        multiply_tile(lo, hi);
        multiply_tile(hi, lo);
        warpgroup_commit_batch();
        warpgroup_wait<0>();
        pipeline.consumer_release(low);
        promote(1.f);
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < size<2>(rA); ++k) {
          begin();
          multiply(k, hi, hi);
          warpgroup_commit_batch();
          warpgroup_wait<0>();
          promote(1.f);
        }
        turns.pass(tiles == 1);
        pipeline.consumer_release(read);
      }
      if constexpr (kBlocked) {
        if (tiles % kFlushTiles == 1) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < size(sum); ++i) accum(i) += sum(i);
          clear(sum);
        }
      }
      read = low;
      ++read;
    }
  }

  /// Every slot was released in mma().
  CUTLASS_DEVICE void mma_tail(MainloopPipeline, PipelineState, int) {}
};

}  // namespace cutfuse::gemm::sm90
