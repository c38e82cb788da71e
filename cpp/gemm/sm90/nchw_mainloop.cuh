/// \file
/// The GEMM on the planes of fp32 NCHW images as they are, at TF32: A's rows are pixels, which lie
/// side by side, so that a k-tile is 32 channels of groups of 32 pixels. The tensor cores read TF32
/// from shared memory only with K side by side; so A's fragments go through registers.
///
/// The copy engine rounds what it brings to TF32 and swizzles it by 128 bytes: word (channel,
/// pixel) of a group lies in 16-byte chunk pixel / 4 ^ channel % 8 of the channel's 128 bytes. The
/// rows of a fragment are so chosen of a group's pixels (AccumulatorCoordinates with kRowStep 4)
/// that the eight rows and four channels that a warp reads at once lie in all of the chunks.
#pragma once

#include <cutlass/cutlass.h>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "device/copies.cuh"
#include "gemm/images.h"
#include "gemm/sm90/coordinates.cuh"
#include "gemm/sm90/images.cuh"
#include "gemm/sm90/mainloop.cuh"

namespace cutfuse::gemm::sm90 {

/// The mainloop `Plain` with A from planes: each of its slots holds 32 channels of A, in fp32.
template <class Plain>
struct WithPlanes : WithImages<Plain> {
  using Base = WithImages<Plain>;
  using typename Base::MainloopPipeline;
  using typename Base::Params;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;

  static constexpr int kTileM = cute::size<0>(typename Base::TileShape{});
  static constexpr int kSlotChannels = 32;
  static constexpr int kGroupWords = kPixelGroup * kSlotChannels;  // of a slot of A
  static constexpr int kSlotBytes = kTileM * kSlotChannels * int(sizeof(float));
  static_assert(kPixelGroup == 32 &&
                kSlotBytes == Base::kSlotK * kTileM * int(sizeof(typename Base::ElementA)));

  /// As that of CUTLASS's collective.
  template <class Inputs, class BlockCoord, class KTiles>
  CUTLASS_DEVICE void load(const Params& params, MainloopPipeline pipeline, PipelineState write,
                           const Inputs& inputs, const BlockCoord& block, KTiles k_tiles, int count,
                           int, uint32_t rank, TensorStorage& shared) const {
    using namespace cute;
    if (params.waits) wait_for_previous_kernels();
    if (!cute::elect_one_sync()) return;
    const auto [m, n, k, part] = block;
    Tensor sB = make_tensor(make_smem_ptr(shared.smem_B.data()), typename Base::SmemLayoutB{});
    const auto block_b = params.tma_load_b.get_slice(rank);
    Tensor from_b = block_b.partition_S(get<1>(inputs)(_, _, n, _, part));
    Tensor to_b = block_b.partition_D(sB);

    auto* const to_a = reinterpret_cast<float*>(shared.smem_A.data());
    const auto* map = params.tma_load_a.get_tma_descriptor();
    const int image_groups = params.images.image_rows() / kPixelGroup;
    const int first_group = int(m) * (kTileM / kPixelGroup);
    int channel = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (; count > 0; --count) {
      pipeline.producer_acquire(write);
      auto* barrier = pipeline.producer_get_barrier(write);
      auto* to = to_a + write.index() * kTileM * kSlotChannels;
      int image = first_group / image_groups;
      int group = first_group - image * image_groups;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTileM / kPixelGroup; ++i) {
        // Of images past the last one zeros come.
        cute::SM90_TMA_LOAD_5D::copy(map, reinterpret_cast<uint64_t*>(barrier),
                                     static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                     to + i * kGroupWords, group * kPixelGroup, channel, image, 0,
                                     0);
        if (++group == image_groups) {
          group = 0;
          ++image;
        }
      }
      copy(params.tma_load_b.with(*barrier, uint16_t(0)), from_b(_, _, _, *k_tiles),
           to_b(_, _, _, write.index()));
      ++k_tiles;
      ++write;
      channel += kSlotChannels;
    }
  }

  /// Every slot was released in mma().
  CUTLASS_DEVICE void mma_tail(MainloopPipeline, PipelineState, int) {}
};

template <class Element, class TileShape, int kStages, int kPlanes>
using NchwBase = WithPlanes<
    PlainMainloop<Element, TileShape, cute::Shape<cute::_1, cute::_1, cute::_1>, kStages, kPlanes>>;

/// With A's fragments in registers.
template <class Element, class TileShape>
using NchwMma = decltype(cute::make_tiled_mma(
    cute::GMMA::rs_op_selector<Element, Element, float, TileShape, cute::GMMA::Major::K,
                               cute::GMMA::Major::K>(),
    cute::Layout<cute::Shape<cute::_2, cute::_1, cute::_1>>{}));

template <class TileShape, int kStages>
struct NchwMainloop : NchwBase<float, TileShape, kStages, 1> {
  using Base = NchwBase<float, TileShape, kStages, 1>;
  using Base::kGroupWords;
  using Base::kTileM;
  using typename Base::MainloopPipeline;
  using typename Base::Params;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;

  using TiledMma = NchwMma<cutlass::tfloat32_t, TileShape>;

  /// The consumers' side: two sets of A's fragments, one of which is read while the other is
  /// multiplied.
  template <class FrgTensorC>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState read, FrgTensorC& accum,
                          int count, int thread, TensorStorage& shared, const Params&) {
    using namespace cute;
    Tensor sA = make_tensor(make_smem_ptr(shared.smem_A.data()), typename Base::SmemLayoutA{});
    Tensor sB = make_tensor(make_smem_ptr(shared.smem_B.data()), typename Base::SmemLayoutB{});
    // The index must be warp-uniform for the descriptors to stay in uniform registers.
    const int group = __shfl_sync(0xffffffffu, thread / cutlass::NumThreadsPerWarpGroup, 0);
    TiledMma tiled_mma;
    auto thread_mma = tiled_mma.get_slice(group * cutlass::NumThreadsPerWarpGroup);
    Tensor rB = thread_mma.make_fragment_B(thread_mma.partition_B(sB));  // (MMA, N, K, slot)
    Tensor even = thread_mma.partition_fragment_A(sA(_, _, 0));          // (MMA, M, K)
    Tensor odd = make_fragment_like(even);
    static_assert(decltype(size(even))::value == 4 * (Base::kSlotK / 8));

    const int lane = thread % 32;
    const int row = first_row_of<4>(thread);
    const uint32_t first = cute::cast_smem_ptr_to_uint(shared.smem_A.data()) +
                           row / kPixelGroup * (kGroupWords * 4) + lane % 4 * 128 + row % 4 * 4;
    uint32_t from[2][2];  // [4 more pixels][4 more channels]
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int chunk = (row % kPixelGroup / 4 + i / 2) ^ (lane % 4 + i % 2 * 4);
      from[i / 2][i % 2] = first + i % 2 * 512 + chunk * 16;
    }
    const auto fill = [&](auto& fragment, int slot) {
      auto words = recast<uint32_t>(fragment);
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < Base::kSlotK / 8; ++k) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) {
          words(i, 0, k) =
              load_shared_word(from[i % 2][i / 2] + slot * Base::kSlotBytes + k * 1024);
        }
      }
    };
    PipelineState done = read;
    tiled_mma.accumulate_ = GMMA::ScaleOut::Zero;
    const auto step = [&](auto& fragment, bool is_first) {
      pipeline.consumer_wait(read);
      fill(fragment, read.index());
      warpgroup_fence_operand(fragment);
      warpgroup_fence_operand(accum);
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < Base::kSlotK / 8; ++k) {
        cute::gemm(tiled_mma, fragment(_, _, k), rB(_, _, k, read.index()), accum);
        tiled_mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      warpgroup_wait<1>();
      if (!is_first) {
        pipeline.consumer_release(done);
        ++done;
      }
      ++read;
    };
    step(even, true);
    CUTLASS_PRAGMA_NO_UNROLL
    for (--count; count > 1; count -= 2) {
      step(odd, false);
      step(even, false);
    }
    if (count > 0) step(odd, false);
    warpgroup_wait<0>();
    warpgroup_fence_operand(accum);
    pipeline.consumer_release(done);
  }
};

}  // namespace cutfuse::gemm::sm90
