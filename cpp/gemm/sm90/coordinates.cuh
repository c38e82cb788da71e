/// \file
/// Where a thread's wgmma accumulators lie in the result, for program/executor.cuh.
#pragma once

#include <cutlass/cutlass.h>

#include <cstdint>

namespace cutfuse::gemm::sm90 {

/// Where one thread's accumulators of an m64nNk16 tile lie: value (j * 2 + r) * 2 + c is at row
/// row0 + 8 r and column column0 + 8 j + c. 32-bit inside: registers are scarce here.
template <int kTileN>
struct AccumulatorCoordinates {
  static constexpr int kRows = 2;
  static constexpr int kColumnPairs = kTileN / 8;
  static constexpr int kSize = kColumnPairs * kRows * 2;
  static constexpr int kColumnPairStride = 8;
  static constexpr int kStagedOperands = kTileN > 128 ? 15 : 31;  // a slot each, after the words'

  int row0;
  int column0;
  int rows;  // of the matrix
  int columns;
  uint32_t staged;  // shared address of this thread's first column in slot 0

  CUTLASS_DEVICE bool row_inside(int r) const { return row0 + 8 * r < rows; }
  CUTLASS_DEVICE bool column_inside(int j, int c) const { return column0 + 8 * j + c < columns; }
  CUTLASS_DEVICE int64_t row(int r) const { return min(row0 + 8 * r, rows - 1); }
  CUTLASS_DEVICE int64_t column(int j, int c) const {
    return min(column0 + 8 * j + c, columns - 1);
  }

  /// Two words of slot `slot` for column pair j.
  CUTLASS_DEVICE int2 read_slot(int slot, int j) const {
    int2 words;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                 : "=r"(words.x), "=r"(words.y)
                 : "r"(staged + (slot * kTileN + 8 * j) * 4)
                 : "memory");
    return words;
  }
  CUTLASS_DEVICE void read_staged(int operand, int j, float* pair) const {
    const int2 words = read_slot(operand + 1, j);
    pair[0] = __int_as_float(words.x);
    pair[1] = __int_as_float(words.y);
  }
};

}  // namespace cutfuse::gemm::sm90
