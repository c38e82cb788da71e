/// \file
/// Where a thread's accumulators lie in the result, for program/executor.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/copies.cuh"

namespace cutfuse::gemm {

/// One thread's accumulators of the 16x8 results that both wgmma and mma.sync are made of: value
/// (j * kRows + r) * 2 + c is at row row0 + kRowStep r and column column0 + 8 j + c, where lane l
/// has row0 = first row + l / 4, unless the operand's rows are in another order, and column0 =
/// first column + l % 4 * 2. 32-bit inside: registers are scarce here.
template <int kRows_, int kColumnPairs_, int kSlotColumns, int kStagedOperands_, int kRowStep_ = 8>
struct FragmentCoordinates {
  static constexpr int kRowStep = kRowStep_;
  static constexpr int kRows = kRows_;
  static constexpr int kColumnPairs = kColumnPairs_;
  static constexpr int kSize = kColumnPairs * kRows * 2;
  static constexpr int kColumnPairStride = 8;
  static constexpr bool kPlanes = false;
  static constexpr int kStagedOperands = kStagedOperands_;  // a slot each, after the words'

  int row0;
  int column0;
  int rows;  // of the matrix
  int columns;
  uint32_t staged;  // shared address of this thread's first column in slot 0

  __device__ __forceinline__ bool row_inside(int r) const { return row0 + kRowStep * r < rows; }
  __device__ __forceinline__ bool column_inside(int j, int c) const {
    return column0 + 8 * j + c < columns;
  }
  __device__ __forceinline__ int64_t row(int r) const { return min(row0 + kRowStep * r, rows - 1); }
  __device__ __forceinline__ int64_t column(int j, int c) const {
    return min(column0 + 8 * j + c, columns - 1);
  }

  /// Two words of slot `slot`, which is kSlotColumns wide, for column pair j.
  __device__ __forceinline__ int2 read_slot(int slot, int j) const {
    return load_shared(staged + (slot * kSlotColumns + 8 * j) * 4);
  }
  __device__ __forceinline__ void read_staged(int operand, int j, float* pair) const {
    const int2 words = read_slot(operand + 1, j);
    pair[0] = __int_as_float(words.x);
    pair[1] = __int_as_float(words.y);
  }
};

}  // namespace cutfuse::gemm
