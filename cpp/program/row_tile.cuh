/// \file
/// A thread's piece of a matrix that a pass over it reads and writes: 4 rows of 4 columns.
#pragma once

#include <cuda_runtime.h>

#include "cutfuse/types.h"
#include "device/values.cuh"
#include "program/row_limits.h"

namespace cutfuse::row_tile {

inline constexpr int kRowsAtOnce = 4;  // loads in flight per thread
inline constexpr int kWarps = 8;

/// Rows row0 - r and columns column0 .. column0 + 3 of one thread: value (pair * kRows + r) * 2 +
/// c.
struct Coordinates {
  static constexpr int kRows = kRowsAtOnce;
  static constexpr int kColumnPairs = kColumns / 2;
  static constexpr int kSize = kRows * kColumns;
  static constexpr int kColumnPairStride = 2;
  static constexpr bool kPlanes = false;
  static constexpr int kStagedOperands = 0;

  int64_t row0;
  int64_t column0;
  int64_t columns;

  __device__ bool row_inside(int r) const { return row0 - r >= 0; }
  __device__ bool column_inside(int j, int c) const { return column0 + 2 * j + c < columns; }
  __device__ int64_t row(int r) const { return max(row0 - r, int64_t(0)); }
  __device__ int64_t column(int j, int c) const { return min(column0 + 2 * j + c, columns - 1); }
};

__device__ __forceinline__ int index(int j, int r, int c) { return (j * kRowsAtOnce + r) * 2 + c; }

/// kVector: rows are aligned to 4 elements.
template <bool kVector>
__device__ __forceinline__ void load(const Matrix& out, const Coordinates& at,
                                     float (&v)[Coordinates::kSize]) {
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    const int64_t row = at.row(r) * out.row_stride;
    if (kVector) {
      const int64_t first = row + min(at.column0, at.columns - 4);
      float2 pairs[2];
      if (out.dtype == DType::kFloat32) {
        const float4 four =
            *reinterpret_cast<const float4*>(static_cast<const float*>(out.data) + first);
        pairs[0] = {four.x, four.y};
        pairs[1] = {four.z, four.w};
      } else {
        const uint2 words =
            *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(out.data) + first);
        pairs[0] = unpack_pair(words.x, out.dtype);
        pairs[1] = unpack_pair(words.y, out.dtype);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        v[index(j, r, 0)] = pairs[j].x;
        v[index(j, r, 1)] = pairs[j].y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        v[index(i / 2, r, i % 2)] =
            load_mutable(out.data, row + at.column(i / 2, i % 2), out.dtype);
      }
    }
  }
}

template <bool kVector>
__device__ __forceinline__ void store(const Matrix& out, const Coordinates& at,
                                      const float (&v)[Coordinates::kSize]) {
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    if (!at.row_inside(r)) {
      continue;
    }
    const int64_t first = at.row(r) * out.row_stride + at.column0;
    if (!kVector) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (at.column_inside(i / 2, i % 2)) {
          store_value(out.data, first + i, v[index(i / 2, r, i % 2)], out.dtype);
        }
      }
    } else if (!at.column_inside(0, 0)) {
      continue;
    } else if (out.dtype == DType::kFloat32) {
      *reinterpret_cast<float4*>(static_cast<float*>(out.data) + first) = {
          v[index(0, r, 0)], v[index(0, r, 1)], v[index(1, r, 0)], v[index(1, r, 1)]};
    } else {
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(out.data) + first) = {
          pack_pair(v[index(0, r, 0)], v[index(0, r, 1)], out.dtype),
          pack_pair(v[index(1, r, 0)], v[index(1, r, 1)], out.dtype)};
    }
  }
}

inline bool allows_vectors(const Matrix& matrix, int64_t columns) {
  return columns % 4 == 0 && matrix.row_stride % 4 == 0 &&
         reinterpret_cast<uintptr_t>(matrix.data) % 16 == 0;
}

/// Blocks along (columns, rows): eight resident ones a multiprocessor, a few waves of them. Those
/// of the same rows are neighbours, so that memory is read in whole rows.
inline dim3 grid(int64_t rows, int64_t columns, int32_t sm_count,
                 int64_t block_columns = kLanes * kColumns) {
  const int64_t column_blocks = (columns + block_columns - 1) / block_columns;
  const int64_t row_blocks = (rows + kWarps * kRowsAtOnce - 1) / (kWarps * kRowsAtOnce);
  const int64_t wanted = (int64_t(sm_count) * 32 + column_blocks - 1) / column_blocks;
  return dim3(static_cast<unsigned>(column_blocks),
              static_cast<unsigned>(row_blocks < wanted ? row_blocks : wanted));
}

/// Calls body(row0) for each piece of this warp's rows, from the last to the first: what came
/// before wrote the last ones most recently, so they are still in L2.
template <class Body>
__device__ __forceinline__ void for_each_piece(int64_t rows, const Body& body) {
  constexpr int kRowsOfBlock = kWarps * kRowsAtOnce;
  const int64_t pieces = (rows + kRowsOfBlock - 1) / kRowsOfBlock;
  const int64_t own = (pieces + gridDim.y - 1) / gridDim.y;
  const int64_t first = rows - 1 - (own * blockIdx.y * kWarps + threadIdx.x / kLanes) * kRowsAtOnce;
  const int64_t end = max(first - own * kRowsOfBlock, int64_t(-1));
  for (int64_t row0 = first; row0 > end; row0 -= kRowsOfBlock) body(row0);
}

}  // namespace cutfuse::row_tile
