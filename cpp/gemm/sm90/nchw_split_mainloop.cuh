/// \file
/// The GEMM on the planes of fp32 NCHW images as they are, fp32-accurate: as SplitMainloop, but A's
/// pixels come in fp32, and each warp splits its own in registers on the way to the tensor cores.
///
/// Every k-tile of 64 channels of a pixel has a scale of its own, from the largest of its values,
/// which its products' promotion undoes: no pass over x comes before. In a pipeline slot lie 32
/// channels of A and one plane of B's 64; so a pair of slots is a k-tile, as in SplitMainloop.
///
/// Sums are in the units of x and of B's scaled rows. Where fp32's range is too small for them,
/// which takes a pixel of magnitudes beyond 2^100 or none above 2^-100, they end as infinity or
/// NaN, and the epilogue sums again what is not finite.
#pragma once

#include <cuda_fp16.h>
#include <cutlass/cutlass.h>
#include <cute/tensor.hpp>

#include "device/copies.cuh"
#include "gemm/sm90/coordinates.cuh"
#include "gemm/sm90/mainloop.cuh"
#include "gemm/sm90/nchw_mainloop.cuh"

namespace cutfuse::gemm::sm90 {

template <class TileShape, int kStages, int kPromoteK>
struct NchwSplitMainloop : NchwBase<cutlass::half_t, TileShape, kStages, 2> {
  using Base = NchwBase<cutlass::half_t, TileShape, kStages, 2>;
  using typename Base::MainloopPipeline;
  using typename Base::Params;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;

  using TiledMma = NchwMma<cutlass::half_t, TileShape>;

  /// The consumers' side; `count` counts slots: two per k-tile.
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
    Tensor high = Base::make_fragment(tiled_mma);                        // (MMA, M, K)
    Tensor low = make_fragment_like(high);
    static_assert(decltype(size(high))::value == 8 * kSteps);
    Tensor partial = make_fragment_like(accum);
    clear(accum);

    const auto multiply = [&](int k, const auto& a, int slot) {
      cute::gemm(tiled_mma, a(_, _, k), rB(_, _, k, slot), partial);
      tiled_mma.accumulate_ = GMMA::ScaleOut::One;
    };
    const auto multiply_tile = [&](const auto& a, int slot) {
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < kSteps; ++k) multiply(k, a, slot);
    };
    const auto begin = [&] {
      warpgroup_fence_operand(high);
      warpgroup_fence_operand(low);
      warpgroup_fence_operand(partial);
      warpgroup_arrive();
      tiled_mma.accumulate_ = GMMA::ScaleOut::Zero;
    };
    const auto promote = [&](float first_row, float second_row) {
      warpgroup_fence_operand(partial);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(accum); ++i) {
        accum(i) = __fmaf_rn(partial(i), i / 2 % 2 == 0 ? first_row : second_row, accum(i));
      }
    };

    const Pixels pixels(shared, PixelPlaces(params.images), thread);
    const Turns turns(group);
    float x[kSteps][8];            // as the fragments have them
    uint32_t largest[2] = {0, 0};  // of each row, bits of its magnitudes
    PipelineState next = read;
    const auto load = [&] {
      PipelineState second = next;
      ++second;
      pipeline.consumer_wait(next);
      pipeline.consumer_wait(second);
      pixels.load(next.index(), second.index(), x);
      next = second;
      ++next;
    };
    load();
    CUTLASS_PRAGMA_NO_UNROLL
    for (int tiles = count / 2; tiles > 0; --tiles) {
      PipelineState second = read;
      ++second;
      const int of_high = read.index(), of_low = second.index();
      float unscale[2];
      split(x, high, low, largest, unscale);
      turns.wait();
      begin();
      // Small products first: the accumulator truncates at the size of what it already holds.
      if constexpr (kPromoteK == kTileK) {
        multiply_tile(low, of_high);
        multiply_tile(high, of_low);
        multiply_tile(high, of_high);
        warpgroup_commit_batch();
        turns.pass(tiles == 1);
        if (tiles > 1) load();
        warpgroup_wait<0>();
        const float factor = tiles % 3 == 0 ? params.promotion : params.promotion2;
        promote(factor * unscale[0], factor * unscale[1]);
      } else {
        multiply_tile(low, of_low);
        multiply_tile(low, of_high);
        multiply_tile(high, of_low);
        warpgroup_commit_batch();
        if (tiles > 1) load();
        warpgroup_wait<0>();
        promote(unscale[0], unscale[1]);
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < kSteps; ++k) {
          begin();
          multiply(k, high, of_high);
          warpgroup_commit_batch();
          warpgroup_wait<0>();
          promote(unscale[0], unscale[1]);
        }
        turns.pass(tiles == 1);
      }
      pipeline.consumer_release(read);
      pipeline.consumer_release(second);
      read = second;
      ++read;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(accum); ++i) {
      if (is_tiny(largest[i / 2 % 2])) accum(i) = NAN;
    }
  }

 private:
  static constexpr int kSteps = kTileK / 16;

  /// The two pixels of each k-tile that a thread has, by AccumulatorCoordinates. The eight rows and
  /// every other of eight channels that a warp reads at once lie in all of the chunks, or, where
  /// nothing is swizzled, up to four in the same bank.
  class Pixels {
   public:
    CUTLASS_DEVICE Pixels(TensorStorage& shared, const PixelPlaces& places, int thread)
        : slot_bytes_(Base::kGroups * PixelPlaces::group_bytes(places.step)),
          eight_channels_(places.eight_channels()) {
      const int pixel = first_row_of<8>(thread);
      const int channel = thread % 4 * 2;
      const uint32_t first = cute::cast_smem_ptr_to_uint(shared.pixels);
      origins_[0] = first + places.of(pixel, channel);
      origins_[1] = first + places.of(pixel, channel + 1);
      further_ = first + places.of(pixel + 8, channel) - origins_[0];
    }

    CUTLASS_DEVICE void load(int first_slot, int second_slot, float (&x)[kSteps][8]) const {
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < kSteps; k += 2) {
        const int slot = (k < 2 ? first_slot : second_slot) * slot_bytes_;
        uint32_t from[2] = {origins_[0] + slot, origins_[1] + slot};
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 8; ++i) {
          float* to = &x[k + i / 4][i / 2 % 2 * 4 + i % 2];
          to[0] = __uint_as_float(load_shared_word(from[i % 2]));
          to[2] = __uint_as_float(load_shared_word(from[i % 2] + further_));
          from[i % 2] += eight_channels_;
        }
      }
    }

   private:
    uint32_t origins_[2];  // of a channel and the next
    int slot_bytes_;
    int eight_channels_;
    int further_;  // eight pixels
  };

  /// Whether a row's magnitudes are so small that fp32 might not hold its scaled sums.
  CUTLASS_DEVICE static bool is_tiny(uint32_t bits) { return bits != 0 && bits < 27u << 23; }

  /// x * 2^e in two fp16 planes, with e of each row of the k-tile so that its largest magnitude is
  /// in [2^14, 2^15); unscale: 2^-e. What is not finite makes its row's results so.
  template <class Fragment>
  CUTLASS_DEVICE static void split(const float (&x)[kSteps][8], Fragment& high, Fragment& low,
                                   uint32_t (&largest)[2], float (&unscale)[2]) {
    float scale[2];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      float magnitude = 0.f;
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < kSteps; ++k) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) {
          magnitude = fmaxf(magnitude, fabsf(x[k][i / 2 * 4 + r * 2 + i % 2]));
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int distance = 1; distance < 4; distance *= 2) {
        magnitude = fmaxf(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, distance));
      }
      const uint32_t bits = __float_as_uint(magnitude);
      largest[r] = max(largest[r], bits);
      const uint32_t exponent = max(bits >> 23, 15u);  // so that both are normal
      scale[r] = __uint_as_float((268u - exponent) << 23);
      unscale[r] = __uint_as_float((exponent - 14u) << 23);
    }
    auto high_words = cute::recast<uint32_t>(high);
    auto low_words = cute::recast<uint32_t>(low);
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float a = x[k][2 * i] * scale[i % 2];
        const float b = x[k][2 * i + 1] * scale[i % 2];
        const __half2 pair = __floats2half2_rn(a, b);
        const float2 rounded = __half22float2(pair);
        const __half2 rest = __floats2half2_rn(a - rounded.x, b - rounded.y);
        high_words(i, 0, k) = *reinterpret_cast<const uint32_t*>(&pair);
        low_words(i, 0, k) = *reinterpret_cast<const uint32_t*>(&rest);
      }
    }
  }
};

}  // namespace cutfuse::gemm::sm90
