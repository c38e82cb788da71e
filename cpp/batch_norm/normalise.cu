/// \file
/// The normalise pass: affine step and second program over a stored result, in place.
#include <algorithm>

#include "batch_norm/kernels.h"
#include "batch_norm/normalise.h"
#include "batch_norm/statistics.cuh"
#include "core/launch.h"
#include "core/status.h"
#include "device/gathering.h"
#include "device/values.cuh"
#include "program/executor.cuh"
#include "program/row_tile.cuh"

namespace cutfuse::batch_norm {
namespace {

using namespace row_tile;  // NOLINT: this file is one pass over row tiles

constexpr int kBlockColumns = kLanes * kColumns;
constexpr int kMaxPartials = 32;

/// Merges the partials of a block's columns, two threads a column. Every block of a column does it;
/// the first one also writes.
__device__ void merge_columns(const Partials& partials, int64_t rows, int64_t columns,
                              const BatchNormBuffers& buffers, float* means, float* invstds) {
  static_assert(kLanes * kWarps == 2 * kBlockColumns);
  const int in_block = threadIdx.x / 2;
  const int half = threadIdx.x % 2;
  const int64_t column = int64_t(blockIdx.y) * kBlockColumns + in_block;
  const Rows n(static_cast<double>(rows));
  const auto [mean, m2] = merge_partials<2>(
      partials.data + min(column, columns - 1) * partials.column_stride, partials.stride,
      static_cast<int>(partials.count), half, n, static_cast<int>(rows));
  if (half == 0) {
    means[in_block] = static_cast<float>(mean);
    invstds[in_block] = inverse_deviation(m2, n, buffers.eps);
    if (blockIdx.x == 0 && column < columns) {
      write_statistics(column, mean, m2, n, load_running(column, buffers), buffers);
    }
  }
}

/// Rows are taken from the last to the first: the contraction wrote the last ones most recently, so
/// they are still in L2. kMerges: the statistics are merged here and not by finalise().
template <bool kVector, bool kMerges>
__global__ void __launch_bounds__(kLanes* kWarps)
    normalise_kernel(const Matrix out, int64_t rows, int64_t columns, const Normalise step,
                     const __grid_constant__ DeviceProgram after, int64_t* num_batches_tracked,
                     const Partials partials, const BatchNormBuffers buffers) {
  wait_for_previous_kernels();
  if (partials.gathering != nullptr &&
      *partials.gathering == static_cast<uint32_t>(Gathering::kTogether)) {
    return;
  }
  if (num_batches_tracked != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    ++*num_batches_tracked;
  }
  const int warp = threadIdx.x / kLanes;
  Coordinates at{0, (int64_t(blockIdx.y) * kLanes + threadIdx.x % kLanes) * kColumns, columns};
  __shared__ float means[kMerges ? kBlockColumns : 1];
  __shared__ float invstds[kMerges ? kBlockColumns : 1];
  if constexpr (kMerges) {
    merge_columns(partials, rows, columns, buffers, means, invstds);
    __syncthreads();
  }
  float mean[kColumns], scale[kColumns], shift[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int64_t column = at.column(i / 2, i % 2);
    const int in_block = threadIdx.x % kLanes * kColumns + i;
    mean[i] = kMerges ? means[in_block] : step.mean[column];
    scale[i] = kMerges ? invstds[in_block] : step.invstd[column];
    if (step.weight != nullptr) scale[i] *= load_value(step.weight, column, step.affine_dtype);
    shift[i] = step.bias != nullptr ? load_value(step.bias, column, step.affine_dtype) : 0.f;
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

/// The rows of a result are few: a block takes many of them, or merging would cost more than it
/// saves.
constexpr unsigned kMergingRowBlocks = 8;

}  // namespace

Status normalise(const Matrix& out, int64_t rows, int64_t columns, const Partials& partials,
                 const BatchNormBuffers& buffers, const DeviceProgram& after, int32_t sm_count,
                 void* stream) noexcept {
  if (columns > kMaxColumns) {
    return error(Code::kNotSupported, "batch_norm over %lld channels: at most %lld are supported",
                 static_cast<long long>(columns), static_cast<long long>(kMaxColumns));
  }
  // The count of batches is raised by one block: no other may read it then.
  const bool merges = partials.count <= kMaxPartials && buffers.momentum >= 0.0;
  dim3 blocks = grid(rows, columns, sm_count);
  if (merges) {
    blocks.x = std::min(blocks.x, kMergingRowBlocks);
  } else if (Status status =
                 finalise(partials.data, partials.count, rows, columns, buffers, stream);
             !status.ok()) {
    return status;
  }
  const bool vectors = allows_vectors(out, columns);
  const auto kernel =
      merges ? (vectors ? normalise_kernel<true, true> : normalise_kernel<false, true>)
             : (vectors ? normalise_kernel<true, false> : normalise_kernel<false, false>);
  const Normalise step{buffers.save_mean, buffers.save_invstd, buffers.weight, buffers.bias,
                       buffers.affine_dtype};
  return cutfuse::launch(kernel, blocks, kLanes * kWarps, 0, stream, out, rows, columns, step,
                         after, buffers.num_batches_tracked, partials, buffers);
}

}  // namespace cutfuse::batch_norm
