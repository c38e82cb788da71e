/// \file
/// The normalise pass: affine step and second program over a stored result, in place.
#include <algorithm>

#include "batch_norm/kernels.h"
#include "core/launch.h"
#include "core/status.h"
#include "program/executor.cuh"

namespace cutfuse::batch_norm {
namespace {

constexpr int kColumns = 4;     // of one thread: a 16-byte access
constexpr int kRowsAtOnce = 4;  // loads in flight per thread
constexpr int kLanes = 32;
constexpr int kWarps = 8;

/// Rows row0 - r and columns column0 .. column0 + 3 of one thread: value (pair * kRows + r) * 2 +
/// c.
struct Coordinates {
  static constexpr int kRows = kRowsAtOnce;
  static constexpr int kColumnPairs = kColumns / 2;
  static constexpr int kSize = kRows * kColumns;
  static constexpr int kColumnPairStride = 2;
  static constexpr int kStagedOperands = 0;

  int64_t row0;
  int64_t column0;
  int64_t columns;

  __device__ bool row_inside(int r) const { return row0 - r >= 0; }
  __device__ bool column_inside(int j, int c) const { return column0 + 2 * j + c < columns; }
  __device__ int64_t row(int r) const { return max(row0 - r, int64_t(0)); }
  __device__ int64_t column(int j, int c) const { return min(column0 + 2 * j + c, columns - 1); }
};

__device__ int index(int j, int r, int c) { return (j * kRowsAtOnce + r) * 2 + c; }

template <bool kVector>
__device__ void load(const Matrix& out, const Coordinates& at, float (&v)[Coordinates::kSize]) {
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    const float* row = out.data + at.row(r) * out.row_stride;
    if (kVector) {
      const float4 four = *reinterpret_cast<const float4*>(row + min(at.column0, at.columns - 4));
      v[index(0, r, 0)] = four.x, v[index(0, r, 1)] = four.y;
      v[index(1, r, 0)] = four.z, v[index(1, r, 1)] = four.w;
    } else {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) v[index(i / 2, r, i % 2)] = row[at.column(i / 2, i % 2)];
    }
  }
}

template <bool kVector>
__device__ void store(const Matrix& out, const Coordinates& at,
                      const float (&v)[Coordinates::kSize]) {
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    if (!at.row_inside(r)) {
      continue;
    }
    float* row = out.data + at.row(r) * out.row_stride + at.column0;
    if (kVector) {
      if (at.column_inside(0, 0)) {
        *reinterpret_cast<float4*>(row) = {v[index(0, r, 0)], v[index(0, r, 1)], v[index(1, r, 0)],
                                           v[index(1, r, 1)]};
      }
    } else {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (at.column_inside(i / 2, i % 2)) row[i] = v[index(i / 2, r, i % 2)];
      }
    }
  }
}

/// Rows are taken from the last to the first: the contraction wrote the last ones most recently, so
/// they are still in L2.
template <bool kVector>
__global__ void __launch_bounds__(kLanes* kWarps)
    normalise_kernel(const Matrix out, int64_t rows, int64_t columns, const Normalise step,
                     const __grid_constant__ DeviceProgram after, int64_t* num_batches_tracked) {
  wait_for_previous_kernels();
  if (num_batches_tracked != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    ++*num_batches_tracked;
  }
  const int warp = threadIdx.x / kLanes;
  Coordinates at{0, (int64_t(blockIdx.y) * kLanes + threadIdx.x % kLanes) * kColumns, columns};
  float mean[kColumns], scale[kColumns], shift[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int64_t column = at.column(i / 2, i % 2);
    mean[i] = step.mean[column];
    scale[i] = step.invstd[column] * (step.weight != nullptr ? step.weight[column] : 1.f);
    shift[i] = step.bias != nullptr ? step.bias[column] : 0.f;
  }
  const int64_t stride = int64_t(gridDim.x) * kWarps * kRowsAtOnce;
  for (int64_t done = (int64_t(blockIdx.x) * kWarps + warp) * kRowsAtOnce; done < rows;
       done += stride) {
    at.row0 = rows - 1 - done;
    float v[Coordinates::kSize];
    load<kVector>(out, at, v);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        float& value = v[index(i / 2, r, i % 2)];
        value = fmaf(value - mean[i], scale[i], shift[i]);
      }
    }
    execute(after, v, at);
    store<kVector>(out, at, v);
  }
}

}  // namespace

Status normalise(const Matrix& out, int64_t rows, int64_t columns, const Normalise& step,
                 const DeviceProgram& after, int64_t* num_batches_tracked, int32_t sm_count,
                 void* stream) noexcept {
  const int64_t column_blocks = (columns + kLanes * kColumns - 1) / (kLanes * kColumns);
  const int64_t row_blocks = (rows + kWarps * kRowsAtOnce - 1) / (kWarps * kRowsAtOnce);
  if (column_blocks > 65535) {
    return error(Code::kNotSupported, "batch_norm over %lld channels: at most %d are supported",
                 static_cast<long long>(columns), 65535 * kLanes * kColumns);
  }
  // Eight resident blocks a multiprocessor, a few waves of them.
  const int64_t wanted = (int64_t(sm_count) * 32 + column_blocks - 1) / column_blocks;
  const dim3 grid(static_cast<unsigned>(std::min(row_blocks, wanted)),
                  static_cast<unsigned>(column_blocks));
  const bool vector = columns % 4 == 0 && out.row_stride % 4 == 0 &&
                      reinterpret_cast<uintptr_t>(out.data) % 16 == 0;
  return launch(vector ? normalise_kernel<true> : normalise_kernel<false>, grid, kLanes * kWarps, 0,
                stream, out, rows, columns, step, after, num_batches_tracked);
}

}  // namespace cutfuse::batch_norm
