/// \file
/// Ways of a warp's accumulators to memory: through shared memory by the copy engine, which goes on
/// while the next tile is multiplied and clips at the matrix's bounds.
#pragma once

#include <cuda.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>
#include <cute/arch/copy_sm90_tma.hpp>

#include "device/moments.h"
#include "device/values.cuh"
#include "gemm/launcher.h"
#include "gemm/sm90/coordinates.cuh"
#include "gemm/sm90/matrices.cuh"
#include "gemm/stage.cuh"
#include "gemm/store.cuh"
#include "program/device_program.h"
#include "program/step_math.h"

namespace cutfuse::gemm::sm90 {

inline constexpr int kBoxWords = 16;  // 64 bytes of a row

/// A warp's own piece of shared memory: boxes on their way to memory, then its moments.
template <int kTileN, int kBoxes_ = 2>
union alignas(1024) WarpStorage {
  /// In flight. A tile sends whole multiples of them, so that it may begin anew with the first.
  static constexpr int kBoxes = kBoxes_;
  static_assert(kTileN / 32 % kBoxes == 0);
  uint32_t boxes[kBoxes][16 * kBoxWords];
  Moments moments[kTileN];
};

/// A tile's operands in shared memory, see stage.cuh, and its words of A's rows.
template <class Coordinates, int kTileM, int kTileN>
struct Staged {
  int32_t slots[kSlots<Coordinates> * kTileN];
  int32_t row_words[kTileM];
  bool columns_plain;
};

/// Of one consumer warpgroup.
CUTLASS_DEVICE void sync_group(int thread) {
  cutlass::arch::NamedBarrier::sync(128, 2u + thread / 128);
}

/// Word of (row, word) in a box: bits 4 and 5 of the address are flipped by bits 7 and 8.
CUTLASS_DEVICE int swizzled(int row, int word) {
  const int offset = row * kBoxWords + word;
  return offset ^ ((offset >> 5 & 3) << 2);
}

/// What depends on `lane` is computed after this point: box addresses would otherwise be kept, and
/// spilled, from tile to tile.
CUTLASS_DEVICE void keep_here(int& lane) { asm volatile("" : "+r"(lane)); }

/// Of values as they leave: nothing is left to be done.
struct Finished {
  template <int kCount>
  CUTLASS_DEVICE void operator()(float (&)[kCount], int, int) const {}
};

/// Or bounds.
struct Bounded {
  float lowest, highest;
  template <int kCount>
  CUTLASS_DEVICE void operator()(float (&v)[kCount], int first, int count) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = first; i < first + count; ++i) v[i] = minimum(maximum(v[i], lowest), highest);
  }
};

/// Or the program's ending: its special functions go on while the boxes before are read.
struct Ended {
  const Ending& ending;
  template <int kCount>
  CUTLASS_DEVICE void operator()(float (&v)[kCount], int first, int count) const {
    const float factor = ending.factor;
    const float term = ending.term;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < count; ++i) v[first + i] = __fmaf_rn(sigmoid(v[first + i]), factor, term);
  }
};

/// Before `then` a program's affine steps, as apply_folded() has them.
template <class Coordinates, bool kScaledRows, class Then>
struct Folded {
  const Coordinates& at;
  const float (&rows)[2];  ///< scales, 1 without kScaledRows
  Then then;
  template <int kCount>
  CUTLASS_DEVICE void operator()(float (&v)[kCount], int first, int count) const {
    CUTLASS_PRAGMA_UNROLL
    for (int j = first / 4; j < (first + count) / 4; ++j) {
      const int2 scale = at.read_slot(kScaleSlot<Coordinates>, j);
      const int2 shift = at.read_slot(kScaleSlot<Coordinates> + 1, j);
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        float* pair = &v[4 * j + 2 * r];
        if (kScaledRows) {
          pair[0] *= rows[r];
          pair[1] *= rows[r];
        }
        pair[0] = fmaf(pair[0], __int_as_float(scale.x), __int_as_float(shift.x));
        pair[1] = fmaf(pair[1], __int_as_float(scale.y), __int_as_float(shift.y));
      }
    }
    then(v, first, count);
  }
};

/// Waits until the box that `number` takes is free; calls fill(box); sends it.
template <int kTileN, class Fill>
CUTLASS_DEVICE void send_box(int number, int lane, const CUtensorMap* map, int column, int row,
                             int plane, WarpStorage<kTileN>& storage, const Fill& fill) {
  constexpr int kBoxes = WarpStorage<kTileN>::kBoxes;
  uint32_t* box = storage.boxes[number % kBoxes];
  cute::tma_store_wait<kBoxes - 1>();  // of lane 0's boxes, the one that was here has left
  __syncwarp();
  fill(box);
  cute::tma_store_fence();
  __syncwarp();
  if (lane == 0) {
    cute::SM90_TMA_STORE_3D::copy(map, box, column, row, plane);
    cute::tma_store_arrive();
  }
}

/// fp32, 16 columns a box.
template <int kTileN, class Finish>
CUTLASS_DEVICE void store_boxes(float (&v)[AccumulatorCoordinates<kTileN>::kSize],
                                const AccumulatorCoordinates<kTileN>& at, int lane,
                                const CUtensorMap* map, int plane, WarpStorage<kTileN>& storage,
                                const Finish& finish) {
  keep_here(lane);
  CUTLASS_PRAGMA_UNROLL
  for (int number = 0; number < kTileN / 16; ++number) {
    finish(v, 8 * number, 8);
    const auto fill = [&](uint32_t* box) {
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int j = 2 * number + half;
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 2; ++r) {
          const int word = swizzled(lane / 4 + 8 * r, 8 * half + lane % 4 * 2);
          *reinterpret_cast<float2*>(box + word) = {v[(j * 2 + r) * 2], v[(j * 2 + r) * 2 + 1]};
        }
      }
    };
    send_box<kTileN>(number, lane, map, at.column0 + number * 16, at.row0, plane, storage, fill);
  }
}

/// 32 columns of 16-bit values, of which pack(a, b) makes a word of two.
template <int kSize, class Pack>
CUTLASS_DEVICE void fill_packed_box(const float (&v)[kSize], int number, int lane, uint32_t* box,
                                    const Pack& pack) {
  const int row = lane % 16;
  const uint32_t start = cute::cast_smem_ptr_to_uint(box);
  CUTLASS_PRAGMA_UNROLL
  for (int half = 0; half < 2; ++half) {
    uint32_t words[4];  // of rows 0 to 7 and 8 to 15, of one quarter of the columns and the next
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int j = 4 * number + 2 * half + i / 2;
      words[i] = pack(v[(j * 2 + i % 2) * 2], v[(j * 2 + i % 2) * 2 + 1]);
    }
    store_matrices(start + swizzled(row, 8 * half + lane / 16 * 4) * 4, words);
  }
}

template <int kTileN, class Finish, class Pack>
CUTLASS_DEVICE void store_packed_boxes(float (&v)[AccumulatorCoordinates<kTileN>::kSize],
                                       const AccumulatorCoordinates<kTileN>& at, int lane,
                                       const CUtensorMap* map, int plane,
                                       WarpStorage<kTileN>& storage, const Finish& finish,
                                       const Pack& pack) {
  keep_here(lane);
  CUTLASS_PRAGMA_UNROLL
  for (int number = 0; number < kTileN / 32; ++number) {
    finish(v, 16 * number, 16);
    const auto fill = [&](uint32_t* box) { fill_packed_box(v, number, lane, box, pack); };
    send_box<kTileN>(number, lane, map, at.column0 + number * 32, at.row0, plane, storage, fill);
  }
}

template <int kTileN, class Finish>
CUTLASS_DEVICE void store_narrow_boxes(float (&v)[AccumulatorCoordinates<kTileN>::kSize],
                                       const AccumulatorCoordinates<kTileN>& at, int lane,
                                       const CUtensorMap* map, DType dtype,
                                       WarpStorage<kTileN>& storage, const Finish& finish) {
  if (dtype == DType::kFloat16) {
    store_packed_boxes<kTileN>(v, at, lane, map, 0, storage, finish,
                               [](float a, float b) { return pack_pair(a, b, DType::kFloat16); });
  } else {
    store_packed_boxes<kTileN>(v, at, lane, map, 0, storage, finish,
                               [](float a, float b) { return pack_pair(a, b, DType::kBFloat16); });
  }
}

/// Bounded values as fp16 planes at kBoundedExponent: what the next contraction reads.
template <int kTileN, class Finish>
CUTLASS_DEVICE void store_plane_boxes(float (&v)[AccumulatorCoordinates<kTileN>::kSize],
                                      const AccumulatorCoordinates<kTileN>& at, int lane,
                                      const CUtensorMap* map, int planes,
                                      WarpStorage<kTileN>& storage, const Finish& finish) {
  const auto scale = [&](auto& values, int first, int count) {
    finish(values, first, count);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < count; ++i) values[first + i] *= 1 << kBoundedExponent;
  };
  store_packed_boxes<kTileN>(v, at, lane, map, 0, storage, scale,
                             [](float a, float b) { return pack_pair(a, b, DType::kFloat16); });
  if (planes == 2) {
    store_packed_boxes<kTileN>(v, at, lane, map, 1, storage, Finished{}, [](float a, float b) {
      const float2 hi = unpack_pair(pack_pair(a, b, DType::kFloat16), DType::kFloat16);
      return pack_pair(a - hi.x, b - hi.y, DType::kFloat16);
    });
  }
}

/// For results that allow neither boxes nor pairs: 32 columns of a row leave together.
template <int kTileN>
CUTLASS_DEVICE void store_rows(const float (&v)[AccumulatorCoordinates<kTileN>::kSize],
                               const AccumulatorCoordinates<kTileN>& at, int lane,
                               const Matrix& out, WarpStorage<kTileN>& storage) {
  constexpr int kPitch = 40;  // words: neither the pairs written nor the rows read conflict
  static_assert(8 * kPitch * sizeof(float) <= sizeof(storage.boxes));
  auto* staged = reinterpret_cast<float*>(storage.boxes);
  const int first_row = at.row0 - lane / 4;
  CUTLASS_PRAGMA_UNROLL
  for (int number = 0; number < kTileN / 32; ++number) {
    const int column = at.column0 - lane % 4 * 2 + 32 * number + lane;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      __syncwarp();
      CUTLASS_PRAGMA_UNROLL
      for (int quarter = 0; quarter < 4; ++quarter) {
        const int j = 4 * number + quarter;
        *reinterpret_cast<float2*>(staged + lane / 4 * kPitch + 8 * quarter + lane % 4 * 2) = {
            v[(j * 2 + r) * 2], v[(j * 2 + r) * 2 + 1]};
      }
      __syncwarp();
      if (column < at.columns) {
        const int rows = at.rows - first_row - 8 * r;
        const int64_t first = int64_t(first_row + 8 * r) * out.row_stride + column;
        CUTLASS_PRAGMA_UNROLL
        for (int row = 0; row < 8; ++row) {
          if (row < rows) {
            store_value(out.data, first + row * out.row_stride, staged[row * kPitch + lane],
                        out.dtype);
          }
        }
      }
    }
  }
}

}  // namespace cutfuse::gemm::sm90
