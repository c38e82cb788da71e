/// \file
/// Mainloop of the sm_80 GEMM: tiles of A and B come by cp.async into a ring of stages, fragments
/// by ldmatrix, products by mma.sync. Two planes are multiplied as sm90/mainloop.cuh explains:
/// lo * hi and hi * lo first, then hi * hi, into a fresh set of accumulators that is promoted to
/// the fp32 sum after every k-tile. promote_k = 16 adds lo * lo and promotes after every
/// instruction of hi * hi. Tiles of 64 have registers for a third set: sums of the last 1024 of K
/// (128 at promote_k = 16), which divides the error of promotion's own roundings.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "gemm/sm80/images.cuh"
#include "gemm/sm80/instructions.cuh"
#include "gemm/sm80/operands.h"
#include "gemm/sm80/shape.h"

namespace cutfuse::gemm::sm80 {

/// Copies k-tiles: a thread takes the same vector of every kRowsAtOnce-th row. Rows beyond the
/// matrix repeat its last one (their results are not stored); K beyond the matrix is zeros, but
/// for the rest of the last vector, which mask() clears.
template <class Shape>
class Copier {
 public:
  __device__ Copier(const Operands& operands, Tile tile, uint32_t shared)
      : operands_(operands), vector_(static_cast<int>(threadIdx.x) % Shape::kVectors) {
    const int row = static_cast<int>(threadIdx.x) / Shape::kVectors;
    to_ = shared + tile_offset<Shape::kRowBytes>(row, vector_);
    row_a_ = tile.m * Shape::kTileM + row;
    row_b_ = tile.n * Shape::kTileN + row;
    if constexpr (kImages) pixels_.start(operands, row_a_);
  }

  /// Starts copying k-tile `k_tile`, zeros if there is none, to the stage `stage` bytes behind the
  /// first. Of images, the tiles one after the other.
  __device__ __forceinline__ void copy(int k_tile, uint32_t stage) {
    const bool inside = k_tile * Shape::kTileK + vector_ * 8 < operands_.k;
    const int64_t from = int64_t(k_tile) * Shape::kRowBytes + vector_ * 16;
    if constexpr (kImages) {
      pixels_.copy(operands_, vector_, to_ + stage, inside);
    } else {
      copy_rows<Shape::kTileM>(operands_.a + from, operands_.a_leading, operands_.a_plane, row_a_,
                               operands_.m, to_ + stage, inside);
    }
    copy_rows<Shape::kTileN>(operands_.b + from, operands_.b_leading, operands_.b_plane, row_b_,
                             operands_.n, to_ + stage + Shape::kPlanes * Shape::kPlaneBytesA,
                             inside);
  }

  /// Clears what lies behind k in its last vector: a tensor may have anything there.
  __device__ static void mask(int k, unsigned char* stage) {
    const int vector = k % Shape::kTileK / 8;
    const int kept = k % 8;
    for (int row = static_cast<int>(threadIdx.x); row < Shape::kStageBytes / Shape::kRowBytes;
         row += Shape::kThreads) {
      auto* elements =
          reinterpret_cast<uint16_t*>(stage + tile_offset<Shape::kRowBytes>(row, vector));
      for (int i = kept; i < 8; ++i) elements[i] = 0;
    }
  }

 private:
  static constexpr int kRowsAtOnce = Shape::kThreads / Shape::kVectors;
  static_assert(kRowsAtOnce % 8 == 0 && Shape::kTileM % kRowsAtOnce == 0 &&
                Shape::kTileN % kRowsAtOnce == 0);

  const Operands& operands_;  // in the kernel's constant bank
  int vector_;
  uint32_t to_;
  int row_a_;
  int row_b_;
  static constexpr bool kImages = Shape::kSource == Source::kImages;
  std::conditional_t<kImages, Pixels<Shape, kRowsAtOnce>, NoPixels> pixels_;

  template <int kTileRows>
  __device__ __forceinline__ static void copy_rows(const char* from, int64_t leading,
                                                   int64_t plane_stride, int row, int rows,
                                                   uint32_t to, bool inside) {
    // Opaque, so that the rows' addresses are not kept in registers from tile to tile.
    asm volatile("" : "+r"(row));
#pragma unroll
    for (int i = 0; i < kTileRows / kRowsAtOnce; ++i) {
      const char* at = from + min(row + i * kRowsAtOnce, rows - 1) * leading;
#pragma unroll
      for (int plane = 0; plane < Shape::kPlanes; ++plane) {
        copy_async(to + plane * kTileRows * Shape::kRowBytes + i * kRowsAtOnce * Shape::kRowBytes,
                   at + plane * plane_stride, inside);
      }
    }
  }
};

/// One warp's products of the k-tile in a stage.
template <class Shape>
class Multiplier {
 public:
  static constexpr int kSize = Shape::kSize;
  using Accumulators = float[kSize];

  __device__ explicit Multiplier(uint32_t shared) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    // ldmatrix: for A the matrices are (rows 0-7, 8-15) x (k 0-7, 8-15), rows first; for B two
    // column groups of 8 x (k 0-7, 8-15), k first.
    const int row_a = warp / Shape::kWarpsN * Shape::kWarpM + lane % 16;
    const int row_b = warp % Shape::kWarpsN * Shape::kWarpN + lane / 16 * 8 + lane % 8;
    shared_ = shared;
    offset_a_ = tile_offset<Shape::kRowBytes>(row_a, lane / 16);
    offset_b_ = tile_offset<Shape::kRowBytes>(row_b, lane / 8 % 2);
  }

  /// sum += A * B of one plane. Like the others below it calls copy() once, when the first
  /// fragments are on their way, so that the tensor cores need not wait for the copies' issue.
  template <class Copy>
  __device__ __forceinline__ void add(uint32_t stage, const Copy& copy, Accumulators& sum) const {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      FragmentA a;
      FragmentB b;
      load(stage, 0, k, a);
      load(stage, 0, k, b);
      if (k == 0) copy();
      multiply<true>(a, b, sum);
    }
  }

  /// Adds the products of both planes, promoted with `factor`, to `sum`. Small products first: the
  /// accumulator truncates at the size of what it already holds.
  template <class Copy>
  __device__ __forceinline__ void add_split(uint32_t stage, const Copy& copy, float factor,
                                            Accumulators& sum) const {
    FragmentA a_hi[kSteps];
    FragmentB b_hi[kSteps];
    Accumulators partial;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      FragmentA a_lo;
      FragmentB b_lo;
      load(stage, 1, k, a_lo);
      load(stage, 0, k, b_hi[k]);
      load(stage, 0, k, a_hi[k]);
      load(stage, 1, k, b_lo);
      if (k == 0) copy();
      if (k == 0) {
        multiply<false>(a_lo, b_hi[k], partial);
      } else {
        multiply<true>(a_lo, b_hi[k], partial);
      }
      multiply<true>(a_hi[k], b_lo, partial);
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) multiply<true>(a_hi[k], b_hi[k], partial);
    // No branch, so that the first promotions overlap the last products.
    promote(partial, factor, sum);
  }

  /// The same with the fourth product, promoted after every instruction of hi * hi.
  template <class Copy>
  __device__ __forceinline__ void add_split_finest(uint32_t stage, const Copy& copy,
                                                   Accumulators& sum) const {
    FragmentA a;
    FragmentB b;
    Accumulators partial;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      load(stage, 1, k, a);
      load(stage, 1, k, b);
      if (k == 0) copy();
      if (k == 0) {
        multiply<false>(a, b, partial);
      } else {
        multiply<true>(a, b, partial);
      }
      FragmentB b_hi;
      load(stage, 0, k, b_hi);
      multiply<true>(a, b_hi, partial);
      load(stage, 0, k, a);
      multiply<true>(a, b, partial);
    }
    promote(partial, 1.f, sum);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      // Read again: there are no registers to keep them in.
      load(stage, 0, k, a);
      load(stage, 0, k, b);
      multiply<false>(a, b, partial);
      promote(partial, 1.f, sum);
    }
  }

 private:
  static constexpr int kSteps = Shape::kTileK / kMmaK;
  static constexpr int kTilesA = Shape::kWarpM / 16;
  static constexpr int kTilesB = Shape::kWarpN / 8;
  using FragmentA = uint32_t[kTilesA][4];
  using FragmentB = uint32_t[kTilesB][2];

  uint32_t shared_;
  uint32_t offset_a_;
  uint32_t offset_b_;

  // A step of K is two vectors: it flips bits of the permuted vector's number.
  __device__ __forceinline__ void load(uint32_t stage, int plane, int k, FragmentA& a) const {
    const uint32_t at = shared_ + stage + plane * Shape::kPlaneBytesA + (offset_a_ ^ (k * 32));
#pragma unroll
    for (int i = 0; i < kTilesA; ++i) {
      load_matrices(at + i * 16 * Shape::kRowBytes, a[i][0], a[i][1], a[i][2], a[i][3]);
    }
  }

  __device__ __forceinline__ void load(uint32_t stage, int plane, int k, FragmentB& b) const {
    const uint32_t at = shared_ + stage + Shape::kPlanes * Shape::kPlaneBytesA +
                        plane * Shape::kPlaneBytesB + (offset_b_ ^ (k * 32));
#pragma unroll
    for (int j = 0; j < kTilesB; j += 2) {
      load_matrices(at + j * 8 * Shape::kRowBytes, b[j][0], b[j][1], b[j + 1][0], b[j + 1][1]);
    }
  }

  /// In the order of FragmentCoordinates: tile (i, j) holds rows 2 i and 2 i + 1 of column pair j.
  template <bool kAdds>
  __device__ __forceinline__ static void multiply(const FragmentA& a, const FragmentB& b,
                                                  Accumulators& to) {
#pragma unroll
    for (int j = 0; j < kTilesB; ++j) {
#pragma unroll
      for (int i = 0; i < kTilesA; ++i) {
        multiply_add<Shape::kElement, kAdds>(&to[(j * kTilesA + i) * 4], a[i], b[j]);
      }
    }
  }

  __device__ __forceinline__ static void promote(const Accumulators& partial, float factor,
                                                 Accumulators& sum) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum[i] = __fmaf_rn(partial[i], factor, sum[i]);
  }
};

/// v = A * B^T over part `part` of K, for the block's tile. All of `shared` may be overwritten
/// afterwards.
template <class Shape>
__device__ __forceinline__ void run_mainloop(const Operands& operands, Tile tile, int part,
                                             unsigned char* shared, float (&v)[Shape::kSize]) {
  constexpr bool kBlocked = Shape::kPlanes == 2 && Shape::kSize <= 32;
  constexpr int kFlushTiles = (Shape::kPromoteK == kMmaK ? 128 : 1024) / Shape::kTileK;
  constexpr int kAhead = Shape::kStages - 1;
  const int all_tiles = (operands.k + Shape::kTileK - 1) / Shape::kTileK;
  const int first = part * operands.part_tiles;
  const int tiles = min(operands.part_tiles, all_tiles - first);  // maybe none, or below 0
  const bool ends_ragged = operands.k % 8 != 0 && first + tiles == all_tiles;

#pragma unroll
  for (float& value : v) value = 0.f;
  [[maybe_unused]] float block_sum[Shape::kSize] = {};

  Copier<Shape> copier(operands, tile, shared_address(shared));
  const Multiplier<Shape> multiplier(shared_address(shared));
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    copier.copy(first + i, i * Shape::kStageBytes);
    commit_copies();
  }
  uint32_t stage = 0;
  uint32_t free_stage = kAhead * Shape::kStageBytes;
  const auto next = [](uint32_t at) {
    return at == kAhead * Shape::kStageBytes ? 0 : at + Shape::kStageBytes;
  };
  for (int t = 0; t < tiles; ++t) {
    wait_for_copies<kAhead - 1>();
    __syncthreads();  // the tile is there, and all have left the stage of the tile before
    if (ends_ragged && t == tiles - 1) {
      Copier<Shape>::mask(operands.k, shared + stage);
      __syncthreads();
    }
    float (&sum)[Shape::kSize] = kBlocked ? block_sum : v;
    // Beyond the part's end too: a branch would keep these instructions from mixing with others.
    const auto copy = [&] {
      copier.copy(first + t + kAhead, free_stage);
      commit_copies();
    };
    if constexpr (Shape::kPlanes == 1) {
      multiplier.add(stage, copy, sum);
    } else if constexpr (Shape::kPromoteK == kMmaK) {
      multiplier.add_split_finest(stage, copy, sum);
    } else {
      multiplier.add_split(stage, copy, t % 3 == 0 ? operands.promotion : operands.promotion2, sum);
    }
    if (kBlocked && (tiles - t) % kFlushTiles == 1) {
#pragma unroll
      for (int i = 0; i < Shape::kSize; ++i) {
        v[i] += sum[i];
        sum[i] = 0.f;
      }
    }
    stage = next(stage);
    free_stage = next(free_stage);
  }
  wait_for_copies<0>();
  __syncthreads();
}

}  // namespace cutfuse::gemm::sm80
