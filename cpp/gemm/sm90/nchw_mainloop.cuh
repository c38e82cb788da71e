/// \file
/// The GEMM on the planes of fp32 NCHW images as they are, at TF32: A's rows are pixels, which lie
/// side by side, so that a k-tile is 32 channels of groups of 32 pixels. The tensor cores read TF32
/// from shared memory only with K side by side; so A's fragments go through registers.
///
/// The copy engine rounds what it brings to TF32 and swizzles it by 128 bytes: pixels of a group
/// lie in 16-byte chunk pixel / 4 ^ channel % 8 of the channel's 128 bytes. The rows of a fragment
/// are so chosen of a group's pixels (AccumulatorCoordinates with kRowStep 4) that the eight rows
/// and four channels that a warp reads at once lie in all of the chunks. Where planes do not end on
/// 16 bytes, nothing is swizzled (PixelPlaces), and up to four words lie in the same bank.
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

/// Where pixels of A lie in its slots: [group][channel][pixel], a channel's kPixelGroup of them
/// swizzled; or, of boxes of every fourth channel, [group][channel % 4][channel / 4][pixel]. A box
/// that does not begin at a multiple of 16 bytes is an illegal instruction: then it begins before
/// its first pixel, which is `further` on.
struct PixelPlaces {
  static constexpr int kChannels = 32;  // of a slot

  int step;       // Images::box_step(), 1 or 4
  uint32_t past;  // pixels of a plane past a multiple of four

  CUTLASS_HOST_DEVICE explicit PixelPlaces(const Images& images)
      : step(images.box_step()), past(images.out_pixels() % 4) {}

  CUTLASS_HOST_DEVICE static constexpr int row_bytes(int step) {
    return (kPixelGroup + (step == 1 ? 0 : 4)) * int(sizeof(float));
  }
  CUTLASS_HOST_DEVICE static constexpr int group_bytes(int step) {
    return kChannels * row_bytes(step);
  }
  CUTLASS_HOST_DEVICE static constexpr int box_bytes(int step) { return group_bytes(step) / step; }

  CUTLASS_HOST_DEVICE int further(uint32_t box) const { return box * past % 4; }
  /// Of one of the first eight channels; the others are eight_channels() bytes on.
  CUTLASS_HOST_DEVICE int of(uint32_t pixel, uint32_t channel) const {
    const uint32_t group = pixel / kPixelGroup * group_bytes(step);
    pixel %= kPixelGroup;
    if (step == 1) {
      return group + channel * row_bytes(1) + (pixel / 4 ^ channel) * 16 + pixel % 4 * 4;
    }
    const uint32_t box = channel % 4;
    return group + box * box_bytes(4) + channel / 4 * row_bytes(4) + (pixel + further(box)) * 4;
  }
  CUTLASS_HOST_DEVICE int eight_channels() const { return 8 / step * row_bytes(step); }
};

/// The mainloop `Plain` with A from planes: each of its slots holds 32 channels of A, in fp32.
template <class Plain>
struct WithPlanes : WithImages<Plain> {
  using Base = WithImages<Plain>;
  using typename Base::MainloopPipeline;
  using typename Base::Params;
  using typename Base::PipelineState;

  static constexpr int kTileM = cute::size<0>(typename Base::TileShape{});
  static constexpr int kGroups = kTileM / kPixelGroup;
  static constexpr int kSlots = Base::DispatchPolicy::Stages;
  static_assert(kPixelGroup == 32 && PixelPlaces::kChannels * sizeof(float) ==
                                         Base::kSlotK * sizeof(typename Base::ElementA));

  /// As that of CUTLASS's collective, but for A's slots.
  struct TensorStorage {
    alignas(1024) char pixels[kSlots * kGroups * PixelPlaces::group_bytes(4)];
    alignas(1024) decltype(Base::TensorStorage::smem_B) smem_B;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(const ProblemShape& problem,
                                        const typename Base::Arguments& args, void* workspace) {
    Params params = Base::to_underlying_arguments(problem, args, workspace);
    params.tma_transaction_bytes = kGroups * PixelPlaces::group_bytes(args.images.box_step()) +
                                   sizeof(TensorStorage::smem_B) / kSlots;
    return params;
  }

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

    const PixelPlaces places(params.images);
    const int rows = params.images.image_rows();
    const int pixels = params.images.out_pixels();
    const int first_image = int(m) * kTileM / rows;
    const int first_pixel = int(m) * kTileM - first_image * rows;
    const auto* map = params.tma_load_a.get_tma_descriptor();
    int channel = 0;
    // One thread issues all copies: what it computes for each is what they wait for.
    const auto bring = [&](uint64_t* barrier, char* to, auto step) {
      constexpr int kUnrolled = step == 1 ? kGroups : 1;  // else registers are spilled
      int image = first_image, pixel = first_pixel;
#pragma unroll kUnrolled
      for (int i = 0; i < kGroups; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int box = 0; box < step; ++box) {
          // Of images past the last one zeros come.
          cute::SM90_TMA_LOAD_5D::copy(
              map, barrier, static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
              to + i * PixelPlaces::group_bytes(step) + box * PixelPlaces::box_bytes(step),
              (pixel + box * pixels) & ~3, channel, image, 0, 0);
        }
        pixel += kPixelGroup;
        if (pixel == rows) {
          pixel = 0;
          ++image;
        }
      }
      channel += PixelPlaces::kChannels / step;
    };
    CUTLASS_PRAGMA_NO_UNROLL
    for (; count > 0; --count) {
      pipeline.producer_acquire(write);
      auto* barrier = reinterpret_cast<uint64_t*>(pipeline.producer_get_barrier(write));
      char* to = shared.pixels + write.index() * (kGroups * PixelPlaces::group_bytes(places.step));
      if (places.step == 1) {
        bring(barrier, to, cute::Int<1>{});
      } else {
        bring(barrier, to, cute::Int<4>{});
      }
      copy(params.tma_load_b.with(*pipeline.producer_get_barrier(write), uint16_t(0)),
           from_b(_, _, _, *k_tiles), to_b(_, _, _, write.index()));
      ++k_tiles;
      ++write;
    }
  }

  /// A's of a slot.
  template <class TiledMma>
  CUTLASS_DEVICE static auto make_fragment(const TiledMma& tiled_mma) {
    using Shape = cute::Shape<cute::Int<kTileM>, cute::Int<Base::kSlotK>>;
    return cute::make_tensor<typename TiledMma::ValTypeA>(
        cute::partition_shape_A(tiled_mma, Shape{}));
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
  using typename Base::MainloopPipeline;
  using typename Base::Params;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;

  using TiledMma = NchwMma<cutlass::tfloat32_t, TileShape>;

  /// The consumers' side: two sets of A's fragments, one of which is read while the other is
  /// multiplied.
  template <class FrgTensorC>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState read, FrgTensorC& accum,
                          int count, int thread, TensorStorage& shared, const Params& params) {
    using namespace cute;
    Tensor sB = make_tensor(make_smem_ptr(shared.smem_B.data()), typename Base::SmemLayoutB{});
    // The index must be warp-uniform for the descriptors to stay in uniform registers.
    const int group = __shfl_sync(0xffffffffu, thread / cutlass::NumThreadsPerWarpGroup, 0);
    TiledMma tiled_mma;
    auto thread_mma = tiled_mma.get_slice(group * cutlass::NumThreadsPerWarpGroup);
    Tensor rB = thread_mma.make_fragment_B(thread_mma.partition_B(sB));  // (MMA, N, K, slot)
    Tensor even = Base::make_fragment(tiled_mma);                        // (MMA, M, K)
    Tensor odd = make_fragment_like(even);
    static_assert(decltype(size(even))::value == 4 * (Base::kSlotK / 8));

    const PixelPlaces places(params.images);
    const int slot_bytes = Base::kGroups * PixelPlaces::group_bytes(places.step);
    const int first = first_row_of<4>(thread);
    const auto origin_of = [&](int pixel, int channel) {
      return cast_smem_ptr_to_uint(shared.pixels) + places.of(pixel, channel + thread % 4);
    };
    const uint32_t origins[2] = {origin_of(first, 0), origin_of(first, 4)};
    const int further = origin_of(first + 4, 0) - origins[0];
    const int eight_channels = places.eight_channels();
    const auto fill = [&](auto& fragment, int slot) {
      auto words = recast<uint32_t>(fragment);
      uint32_t from[2] = {origins[0] + slot * slot_bytes, origins[1] + slot * slot_bytes};
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Base::kSlotK / 4; ++i) {
        words(i % 2 * 2, 0, i / 2) = load_shared_word(from[i % 2]);
        words(i % 2 * 2 + 1, 0, i / 2) = load_shared_word(from[i % 2] + further);
        from[i % 2] += eight_channels;
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
