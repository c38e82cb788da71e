/// \file
/// logsumexp where neighbouring threads read neighbouring rows: the kept dimension is the one that
/// lies together in memory, or the rows are so short that a thread takes a whole one.
#include "core/launch.h"
#include "row_reduce/memory.cuh"

namespace cutfuse::row_reduce {
namespace {

/// work.width rows, a power of two, of a block; the threads of a row are width apart.
template <class T>
__global__ void __launch_bounds__(kBlock) reduce_columns_kernel(const __grid_constant__ Work work) {
  __shared__ LogSumExpPartial states[kBlock];
  wait_for_previous_kernels();
  const int width = work.width;
  const int threads = kBlock / width;
  const int64_t begin = int64_t(blockIdx.y) * work.split_length + threadIdx.x / width;
  const int64_t end = min(int64_t(blockIdx.y + 1) * work.split_length, work.length);
  for (int64_t first = int64_t(blockIdx.x) * width; first < work.rows;
       first += int64_t(gridDim.x) * width) {
    const int64_t row = first + threadIdx.x % width;
    LogSumExpPartial mine = empty_logsumexp();
    if (row < work.rows) {
      const T* x = static_cast<const T*>(work.x) + offset_of(work.kept, row);
      for (int64_t group = begin; group < end; group += threads * kColumnBatch) {
        float v[kColumnBatch];
        load_batch<T, 1, kColumnBatch>(x, work.reduced, group, threads, end, v);
        add_values(mine, v);
      }
    }
    for (int half = kBlock / 2; half >= width; half /= 2) {
      states[threadIdx.x] = mine;
      __syncthreads();
      if (threadIdx.x < half) mine = MergeLogSumExp{}(mine, states[threadIdx.x + half]);
      __syncthreads();
    }
    if (threadIdx.x < width && row < work.rows) {
      store(work, row, blockIdx.y, gridDim.y, mine);
    }
  }
}

}  // namespace

Status reduce_columns(const LogSumExpPlan& plan, const void* x, void* out,
                      LogSumExpPartial* partials, void* stream) noexcept {
  const Work work = {
      x,         out,         partials,          plan.kept,  plan.kept_out, plan.reduced,
      plan.rows, plan.length, plan.split_length, plan.width, plan.out_dtype};
  const auto kernel = plan.dtype == DType::kFloat32   ? reduce_columns_kernel<float>
                      : plan.dtype == DType::kFloat16 ? reduce_columns_kernel<__half>
                                                      : reduce_columns_kernel<__nv_bfloat16>;
  const dim3 grid(grid_blocks(plan.rows, plan.width), static_cast<unsigned>(plan.splits));
  return launch(kernel, grid, kBlock, 0, stream, work);
}

}  // namespace cutfuse::row_reduce
