/// \file
/// The GEMM that turns a linear layer over: A is the weight in fp32, whose rows are rounded in
/// registers on the way to the tensor cores, B the plane of x. No pass over the weight comes
/// before: 23 % of the time of 1024x8192x8192, 39 % with 512 rows (H100).
///
/// A slot holds 64 elements of A's rows in boxes of 128 bytes, swizzled by those. A thread's two
/// rows are neighbours (AccumulatorCoordinates with kRowStep 1): the rows that half a warp reads at
/// once are two apart, so that their chunks lie in different banks, and of a column of the result,
/// a row of out, a thread stores two values together.
#pragma once

#include <cuda_fp16.h>
#include <cutlass/cutlass.h>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "device/copies.cuh"
#include "gemm/sm90/coordinates.cuh"
#include "gemm/sm90/mainloop.cuh"
#include "gemm/sm90/nchw_mainloop.cuh"
#include "gemm/turned.h"

namespace cutfuse::gemm::sm90 {

/// A thread's two rows of the boxes.
class RowReader {
 public:
  CUTLASS_DEVICE RowReader(const void* boxes, int thread) {
    const int row = first_row_of<1>(thread);
    const uint32_t first = cute::cast_smem_ptr_to_uint(boxes);
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int chunk = thread % 4 / 2 ^ (row + r) % 8;
      origins_[r] = first + (row + r) * kTurnedRow + chunk * 16 + thread % 2 * 8;
    }
  }

  /// The `half` of K of a box that begins `box` bytes on, as an m64k16 fragment has it.
  CUTLASS_DEVICE void load(int box, int half, float (&x)[8]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int2 pair = load_shared(origins_[i % 2] + box ^ (2 * half + i / 2) << 5);
      x[2 * i] = __int_as_float(pair.x);
      x[2 * i + 1] = __int_as_float(pair.y);
    }
  }

 private:
  uint32_t origins_[2];
};

/// Powers of two that bring the largest of the first 32 magnitudes of a row that are not all zeros
/// to 1 to 2: 2^15 times as much has room above, and what is 2^14 times less keeps fp16's eleven
/// bits. Until then sums are zeros at any scale.
class RowScales {
 public:
  /// By the whole warp, of every 32 elements of its rows in turn.
  template <int kHalves>
  CUTLASS_DEVICE void see(const float (&x)[kHalves][8]) {
    if (!any_open_) return;
    bool open = false;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      uint32_t largest = 0;  // bits of finite magnitudes
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kHalves * 4; ++i) {
        const float value = x[i / 4][i / 2 % 2 * 4 + r * 2 + i % 2];
        const uint32_t bits = __float_as_uint(fabsf(value));
        largest = max(largest, bits < kInfinite << 23 ? bits : 0u);
      }
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      if (of_[r] == 0.f && largest != 0) {
        const uint32_t exponent = min(max(largest >> 23, 1u), 2 * kOne - 1);
        of_[r] = __uint_as_float((2 * kOne - exponent) << 23);
      }
      open = open || of_[r] == 0.f;
    }
    any_open_ = __any_sync(0xffffffffu, open);
  }
  CUTLASS_DEVICE float of(int r) const { return of_[r]; }
  /// Infinite where fp32 might not hold the scaled sums of so small a row.
  CUTLASS_DEVICE float inverse(int r) const {
    if (of_[r] == 0.f) return 0.f;
    const uint32_t exponent = 2 * kOne - (__float_as_uint(of_[r]) >> 23);
    return exponent < kTiny ? INFINITY : __uint_as_float(exponent << 23);
  }

 private:
  static constexpr uint32_t kOne = 127, kInfinite = 255, kTiny = 27;  // exponents

  float of_[2] = {0.f, 0.f};
  bool any_open_ = true;
};

/// CUTLASS's collective with A in fp32. A's map, of boxes as turned_boxes() has them, is put in
/// place of that in tma_load_a. A row has one scale, since sums stay where the tensor cores add.
/// What has no room under it becomes infinity, and the epilogue sums again what is not finite.
template <class TileShape, class ClusterShape, int kStages>
struct TurnedMainloop : PlainMainloop<cutlass::half_t, TileShape, ClusterShape, kStages, 1> {
  using Base = PlainMainloop<cutlass::half_t, TileShape, ClusterShape, kStages, 1>;
  using typename Base::MainloopPipeline;
  using typename Base::Params;
  using typename Base::PipelineState;

  using TiledMma = NchwMma<cutlass::half_t, TileShape>;

  static constexpr int kTileM = cute::size<0>(TileShape{});
  static constexpr int kBoxBytes = kTileM * kTurnedRow;
  static constexpr int kBoxes = kTileK / kTurnedBox;  // of a slot
  static constexpr int kSteps = kTileK / 16;
  static_assert(kBoxes == 2 && cute::size<1>(ClusterShape{}) == 1);

  /// As that of CUTLASS's collective, but for A's slots.
  struct TensorStorage {
    alignas(1024) char rows[kStages * kBoxes * kBoxBytes];
    alignas(1024) decltype(Base::TensorStorage::smem_B) smem_B;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(const ProblemShape& problem,
                                        const typename Base::Arguments& args, void* workspace) {
    Params params = Base::to_underlying_arguments(problem, args, workspace);
    params.tma_transaction_bytes = kBoxes * kBoxBytes + sizeof(TensorStorage::smem_B) / kStages;
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
    const auto everyone = static_cast<uint16_t>((1u << size<0>(ClusterShape{})) - 1);
    int at_k = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (; count > 0; --count) {
      pipeline.producer_acquire(write);
      auto* barrier = pipeline.producer_get_barrier(write);
      CUTLASS_PRAGMA_UNROLL
      for (int box = 0; box < kBoxes; ++box) {
        // Past the ends of a row and of the rows zeros come.
        cute::SM90_TMA_LOAD_5D::copy(params.tma_load_a.get_tma_descriptor(),
                                     reinterpret_cast<uint64_t*>(barrier),
                                     static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                     shared.rows + (write.index() * kBoxes + box) * kBoxBytes, at_k,
                                     int(m) * kTileM, 0, 0, 0);
        at_k += kTurnedBox;
      }
      copy(params.tma_load_b.with(*barrier, everyone), from_b(_, _, _, *k_tiles),
           to_b(_, _, _, write.index()));
      ++k_tiles;
      ++write;
    }
  }

  /// The consumers' side: two sets of A's fragments, of half a slot, one of which is made while the
  /// other is multiplied.
  template <class FrgTensorC>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState read, FrgTensorC& accum,
                          int count, int thread, TensorStorage& shared, const Params&) {
    using namespace cute;
    Tensor sB = make_tensor(make_smem_ptr(shared.smem_B.data()), typename Base::SmemLayoutB{});
    // The index must be warp-uniform for the descriptors to stay in uniform registers.
    const int group = __shfl_sync(0xffffffffu, thread / cutlass::NumThreadsPerWarpGroup, 0);
    TiledMma tiled_mma;
    auto thread_mma = tiled_mma.get_slice(group * cutlass::NumThreadsPerWarpGroup);
    Tensor rB = thread_mma.make_fragment_B(thread_mma.partition_B(sB));  // (MMA, N, K, slot)
    constexpr int kHalf = kSteps / kBoxes;                               // of a slot
    Tensor first = make_fragment(tiled_mma);                             // (MMA, M, K)
    Tensor second = make_fragment_like(first);
    static_assert(decltype(size(first))::value == 8 * kHalf);

    const RowReader rows(shared.rows, thread);
    RowScales scales;
    const auto multiply = [&](auto& fragment, int half) {
      float x[kHalf][8];
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < kHalf; ++k) {
        rows.load((read.index() * kBoxes + half) * kBoxBytes, k, x[k]);
      }
      scales.see(x);
      auto words = recast<uint32_t>(fragment);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kHalf * 4; ++i) {
        const float* pair = &x[i / 4][i % 4 * 2];
        const float scale = scales.of(i % 2);
        const __half2 halves = __floats2half2_rn(pair[0] * scale, pair[1] * scale);
        words(i % 4, 0, i / 4) = *reinterpret_cast<const uint32_t*>(&halves);
      }
      warpgroup_fence_operand(fragment);
      warpgroup_fence_operand(accum);
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < kHalf; ++k) {
        cute::gemm(tiled_mma, fragment(_, _, k), rB(_, _, half * kHalf + k, read.index()), accum);
        tiled_mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      warpgroup_wait<1>();
    };
    tiled_mma.accumulate_ = GMMA::ScaleOut::Zero;
    PipelineState done = read;
    pipeline.consumer_wait(read);
    multiply(first, 0);
    multiply(second, 1);
    ++read;
    CUTLASS_PRAGMA_NO_UNROLL
    for (--count; count > 0; --count) {
      pipeline.consumer_wait(read);
      multiply(first, 0);
      pipeline.consumer_release(done);
      ++done;
      multiply(second, 1);
      ++read;
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(accum);
    pipeline.consumer_release(done);
    const float unscale[2] = {scales.inverse(0), scales.inverse(1)};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(accum); ++i) accum(i) *= unscale[i / 2 % 2];
  }

  /// Every slot was released in mma().
  CUTLASS_DEVICE void mma_tail(MainloopPipeline, PipelineState, int) {}

 private:
  /// A's of half a slot.
  CUTLASS_DEVICE static auto make_fragment(const TiledMma& tiled_mma) {
    using Shape = cute::Shape<cute::Int<kTileM>, cute::Int<kTileK / kBoxes>>;
    return cute::make_tensor<cutlass::half_t>(cute::partition_shape_A(tiled_mma, Shape{}));
  }
};

}  // namespace cutfuse::gemm::sm90
