/// \file
/// Partials of the GEMM's epilogue -> batch statistics and running statistics.
#include <cub/block/block_reduce.cuh>

#include "batch_norm/kernels.h"
#include "core/status.h"
#include "device/moments.cuh"

namespace cutfuse::batch_norm {
namespace {

struct Counted {
  Moments moments;
  float count;
};

struct MergeCounted {
  __device__ Counted operator()(const Counted& a, const Counted& b) const {
    return {merge(a.moments, a.count, b.moments, b.count), a.count + b.count};
  }
};

/// One block a column. The order of merges is fixed by the launch shape: deterministic.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    finalise_kernel(const Moments* partials, int64_t partial_count, int64_t rows, int64_t columns,
                    const BatchNormBuffers buffers) {
  using Reduce = cub::BlockReduce<Counted, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  const int64_t column = blockIdx.x;
  const Moments* of_column = partials + column * partial_count;
  Counted mine{{0.f, 0.f}, 0.f};
  for (int64_t p = threadIdx.x; p < partial_count; p += kThreads) {
    const auto count = static_cast<float>(min(rows - p * kPartialRows, int64_t(kPartialRows)));
    mine = MergeCounted{}(mine, {of_column[p], count});
  }
  const Counted all = Reduce(storage).Reduce(mine, MergeCounted{});
  if (threadIdx.x != 0) {
    return;
  }
  const auto n = static_cast<double>(rows);
  const double mean = all.moments.mean;
  const double var = all.moments.m2 / n;
  buffers.save_mean[column] = all.moments.mean;
  buffers.save_invstd[column] = static_cast<float>(1.0 / sqrt(var + buffers.eps));
  if (buffers.running_mean == nullptr) {
    return;
  }
  const double f = buffers.momentum >= 0.0
                       ? buffers.momentum
                       : 1.0 / static_cast<double>(*buffers.num_batches_tracked + 1);
  const auto blend = [f](float* running, double batch) {
    *running = static_cast<float>((1.0 - f) * static_cast<double>(*running) + f * batch);
  };
  blend(buffers.running_mean + column, mean);
  blend(buffers.running_var + column, all.moments.m2 / (n - 1.0));
}

}  // namespace

Status finalise(const Moments* partials, int64_t partial_count, int64_t rows, int64_t columns,
                const BatchNormBuffers& buffers, void* stream) noexcept {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const auto blocks = static_cast<unsigned>(columns);
  if (partial_count <= 256) {
    finalise_kernel<32><<<blocks, 32, 0, cuda_stream>>>(partials, partial_count, rows, columns,
                                                        buffers);
  } else {
    finalise_kernel<256><<<blocks, 256, 0, cuda_stream>>>(partials, partial_count, rows, columns,
                                                          buffers);
  }
  CUTFUSE_CUDA(cudaGetLastError());
  return {};
}

}  // namespace cutfuse::batch_norm
