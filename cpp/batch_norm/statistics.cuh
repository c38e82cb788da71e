/// \file
/// What becomes of a column's merged moments.
#pragma once

#include <cuda_runtime.h>

#include "cutfuse/batch_norm.h"
#include "device/moments.h"
#include "device/values.cuh"

namespace cutfuse::batch_norm {

/// Rows that partial `p` of a column of `rows` covers.
__device__ __forceinline__ double rows_of_partial(int64_t p, int64_t rows) {
  return static_cast<double>(min(rows - p * kPartialRows, int64_t(kPartialRows)));
}

__device__ __forceinline__ float inverse_deviation(double m2, double rows, double eps) {
  return static_cast<float>(1.0 / sqrt(m2 / rows + eps));
}

/// Writes save_mean and save_invstd and updates the running statistics of `column`.
__device__ __forceinline__ void write_statistics(int64_t column, double mean, double m2,
                                                 double rows, const BatchNormBuffers& buffers) {
  buffers.save_mean[column] = static_cast<float>(mean);
  buffers.save_invstd[column] = inverse_deviation(m2, rows, buffers.eps);
  if (buffers.running_mean == nullptr) {
    return;
  }
  const double f = buffers.momentum >= 0.0
                       ? buffers.momentum
                       : 1.0 / static_cast<double>(*buffers.num_batches_tracked + 1);
  const auto blend = [&](void* running, double batch) {
    const double old = load_mutable(running, column, buffers.running_dtype);
    const auto blended = static_cast<float>((1.0 - f) * old + f * batch);
    store_value(running, column, blended, buffers.running_dtype);
  };
  blend(buffers.running_mean, mean);
  blend(buffers.running_var, m2 / (rows - 1.0));
}

}  // namespace cutfuse::batch_norm
