/// \file
/// Partials of the GEMM's epilogue -> batch statistics and running statistics.
#include <cub/block/block_reduce.cuh>
#include <cub/warp/warp_reduce.cuh>
#include <type_traits>

#include "batch_norm/kernels.h"
#include "core/launch.h"
#include "device/moments.cuh"

namespace cutfuse::batch_norm {
namespace {

constexpr int kBlock = 128;

struct Counted {
  Moments moments;
  float count;
};

struct MergeCounted {
  __device__ Counted operator()(const Counted& a, const Counted& b) const {
    return {merge(a.moments, a.count, b.moments, b.count), a.count + b.count};
  }
};

/// kThreads threads of a block, one warp or all of it, merge one column. The order of merges is
/// fixed by the launch shape: deterministic.
template <int kThreads>
__global__ void __launch_bounds__(kBlock)
    finalise_kernel(const Moments* partials, int64_t partial_count, int64_t rows, int64_t columns,
                    const BatchNormBuffers buffers) {
  using Reduce = std::conditional_t<kThreads == 32, cub::WarpReduce<Counted>,
                                    cub::BlockReduce<Counted, kBlock>>;
  __shared__ typename Reduce::TempStorage storage[kBlock / kThreads];
  wait_for_previous_kernels();
  const int group = threadIdx.x / kThreads;
  const int thread = threadIdx.x % kThreads;
  const int64_t column = int64_t(blockIdx.x) * (kBlock / kThreads) + group;
  if (column >= columns) {
    return;  // whole warps when kThreads is 32; never when the block has one column
  }
  const Moments* of_column = partials + column * partial_count;
  Counted mine{{0.f, 0.f}, 0.f};
  for (int64_t p = thread; p < partial_count; p += kThreads) {
    const auto count = static_cast<float>(min(rows - p * kPartialRows, int64_t(kPartialRows)));
    mine = MergeCounted{}(mine, {of_column[p], count});
  }
  const Counted all = Reduce(storage[group]).Reduce(mine, MergeCounted{});
  if (thread != 0) {
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

__global__ void __launch_bounds__(kBlock)
    fold_kernel(const BatchNormBuffers buffers, int64_t columns, float* scale) {
  wait_for_previous_kernels();
  const int64_t column = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (column < columns) {
    const double var = buffers.running_var[column];
    const float invstd = static_cast<float>(1.0 / sqrt(var + buffers.eps));
    scale[column] = buffers.weight != nullptr ? invstd * buffers.weight[column] : invstd;
  }
}

unsigned blocks(int64_t items, int64_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

}  // namespace

Status finalise(const Moments* partials, int64_t partial_count, int64_t rows, int64_t columns,
                const BatchNormBuffers& buffers, void* stream) noexcept {
  if (partial_count <= 512) {
    return launch(finalise_kernel<32>, blocks(columns, kBlock / 32), kBlock, 0, stream, partials,
                  partial_count, rows, columns, buffers);
  }
  return launch(finalise_kernel<kBlock>, blocks(columns, 1), kBlock, 0, stream, partials,
                partial_count, rows, columns, buffers);
}

Status fold(const BatchNormBuffers& buffers, int64_t columns, float* scale, void* stream) noexcept {
  return launch(fold_kernel, blocks(columns, kBlock), kBlock, 0, stream, buffers, columns, scale);
}

}  // namespace cutfuse::batch_norm
