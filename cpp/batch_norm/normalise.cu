/// \file
/// The normalise pass: affine step and second program over a stored result, in place.
#include "batch_norm/kernels.h"
#include "batch_norm/normalise.h"
#include "core/launch.h"
#include "core/status.h"
#include "device/values.cuh"
#include "program/executor.cuh"
#include "program/row_tile.cuh"

namespace cutfuse::batch_norm {
namespace {

using namespace row_tile;  // NOLINT: this file is one pass over row tiles

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
    scale[i] = step.invstd[column];
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

}  // namespace

Status normalise(const Matrix& out, int64_t rows, int64_t columns, const Moments* partials,
                 int64_t partial_count, const BatchNormBuffers& buffers, const DeviceProgram& after,
                 int32_t sm_count, void* stream) noexcept {
  if (columns > kMaxColumns) {
    return error(Code::kNotSupported, "batch_norm over %lld channels: at most %lld are supported",
                 static_cast<long long>(columns), static_cast<long long>(kMaxColumns));
  }
  if (Status status = finalise(partials, partial_count, rows, columns, buffers, stream);
      !status.ok()) {
    return status;
  }
  const auto kernel =
      allows_vectors(out, columns) ? normalise_kernel<true> : normalise_kernel<false>;
  const Normalise step{buffers.save_mean, buffers.save_invstd, buffers.weight, buffers.bias,
                       buffers.affine_dtype};
  return cutfuse::launch(kernel, grid(rows, columns, sm_count), kLanes * kWarps, 0, stream, out,
                         rows, columns, step, after, buffers.num_batches_tracked);
}

}  // namespace cutfuse::batch_norm
