/// \file
/// What becomes of a column's merged moments.
#pragma once

#include <cuda_runtime.h>

#include "cutfuse/batch_norm.h"
#include "device/moments.h"
#include "device/values.cuh"

namespace cutfuse::batch_norm {

/// Rows that partial `p` of a column of `rows` covers, `most` unless it is the last; none past it.
__device__ __forceinline__ double rows_of_partial(int64_t p, int64_t rows, int32_t most) {
  const int64_t left = min(rows - p * most, int64_t(most));
  return static_cast<double>(static_cast<int>(max(left, int64_t(0))));
}

/// Rows of a batch, and what they divide by: fp64 divisions are long for whom others wait.
struct Rows {
  double count;
  double inverse;
  double inverse_unbiased;

  __device__ __forceinline__ explicit Rows(double count_)
      : count(count_), inverse(1.0 / count_), inverse_unbiased(1.0 / (count_ - 1.0)) {}
};

struct Merged {
  double mean;
  double m2;
};

/// Moments of all rows of a column, to each of the kThreads neighbours in a warp that merge it, of
/// which this is number `merger`: sums of the partials' distances from the first one, in fp64. Each
/// is of `partial_rows` rows. 16 of them are in flight at once: with a round trip to L2 for the
/// first one, for eight and for the others a merge took 4.2 us instead of 1.5 (H100).
template <int kThreads>
__device__ __forceinline__ Merged merge_partials(const Moments* of_column, int64_t stride,
                                                 int partials, int32_t partial_rows, int merger,
                                                 const Rows& rows, int row_count) {
  constexpr int kAtOnce = 16 / kThreads;
  const auto* from = reinterpret_cast<const float2*>(of_column);
  double origin = 0.0;
  double sum = 0.0;
  double squares = 0.0;
#pragma unroll 1
  for (int first = merger; first < partials + merger; first += kThreads * kAtOnce) {
    float2 raw[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int p = first + kThreads * i;
      raw[i] = p < partials ? __ldcg(from + p * stride) : float2{};
    }
    if (first == merger) origin = __shfl_sync(0xffffffffu, raw[0].x, 0, kThreads);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const double count = rows_of_partial(first + kThreads * i, row_count, partial_rows);
      const double delta = raw[i].x - origin;
      sum = fma(count, delta, sum);
      squares += fma(count * delta, delta, static_cast<double>(raw[i].y));
    }
  }
#pragma unroll
  for (int other = 1; other < kThreads; other *= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, other);
    squares += __shfl_xor_sync(0xffffffffu, squares, other);
  }
  const double m2 = squares - sum * sum * rows.inverse;
  return {origin + sum * rows.inverse, m2 < 0.0 ? 0.0 : m2};  // NaN stays
}

/// 1 / sqrt(m2 / rows + eps): one Newton step from fp32's root where fp32 has the variance.
__device__ __forceinline__ float inverse_deviation(double m2, const Rows& rows, double eps) {
  const double variance = fma(m2, rows.inverse, eps);
  if (!(variance > 1e-30 && variance < 1e30)) return static_cast<float>(1.0 / sqrt(variance));
  const double guess = rsqrtf(static_cast<float>(variance));
  return static_cast<float>(guess * fma(-0.5 * variance * guess, guess, 1.5));
}

/// A column's running statistics, or zeros if there are none.
struct Running {
  float mean = 0.f;
  float var = 0.f;
};

__device__ __forceinline__ Running load_running(int64_t column, const BatchNormBuffers& buffers) {
  if (buffers.running_mean == nullptr) return {};
  return {load_mutable(buffers.running_mean, column, buffers.running_dtype),
          load_mutable(buffers.running_var, column, buffers.running_dtype)};
}

/// Writes save_mean and save_invstd of `column` and updates its running statistics, which were
/// `old`.
__device__ __forceinline__ void write_statistics(int64_t column, double mean, double m2,
                                                 const Rows& rows, const Running& old,
                                                 const BatchNormBuffers& buffers) {
  buffers.save_mean[column] = static_cast<float>(mean);
  buffers.save_invstd[column] = inverse_deviation(m2, rows, buffers.eps);
  if (buffers.running_mean == nullptr) {
    return;
  }
  const double f = buffers.momentum >= 0.0
                       ? buffers.momentum
                       : 1.0 / static_cast<double>(*buffers.num_batches_tracked + 1);
  const auto blend = [&](void* running, double before, double batch) {
    const auto blended = static_cast<float>((1.0 - f) * before + f * batch);
    store_value(running, column, blended, buffers.running_dtype);
  };
  blend(buffers.running_mean, old.mean, mean);
  blend(buffers.running_var, old.var, m2 * rows.inverse_unbiased);
}

}  // namespace cutfuse::batch_norm
