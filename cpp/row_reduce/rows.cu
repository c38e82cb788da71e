/// \file
/// logsumexp where the threads of a row read neighbouring elements of it.
#include <cub/block/block_reduce.cuh>
#include <cub/warp/warp_reduce.cuh>
#include <type_traits>

#include "core/launch.h"
#include "row_reduce/memory.cuh"

namespace cutfuse::row_reduce {
namespace {

/// kThreads threads reduce one row, or part blockIdx.y of it. The order of merges is fixed by the
/// launch shape: deterministic.
template <class T, int kThreads, int kVector>
__global__ void __launch_bounds__(kBlock) reduce_rows_kernel(const __grid_constant__ Work work) {
  using Reduce = std::conditional_t<kThreads <= 32, cub::WarpReduce<LogSumExpPartial, kThreads>,
                                    cub::BlockReduce<LogSumExpPartial, kBlock>>;
  constexpr int kRows = kBlock / kThreads;
  constexpr int kLoads = kRowBatch / kVector;
  __shared__ typename Reduce::TempStorage storage[kRows];
  wait_for_previous_kernels();
  const int group = threadIdx.x / kThreads;
  const int thread = threadIdx.x % kThreads;
  const int64_t begin = int64_t(blockIdx.y) * work.split_length;
  const int64_t end = min(begin + work.split_length, work.length);
  for (int64_t row = int64_t(blockIdx.x) * kRows + group; row < work.rows;
       row += int64_t(gridDim.x) * kRows) {
    const T* x = static_cast<const T*>(work.x) + offset_of(work.kept, row);
    LogSumExpPartial mine = empty_logsumexp();
    for (int64_t first = begin + thread; first < end; first += kThreads * kLoads) {
      float v[kRowBatch];
      load_batch<T, kVector, kLoads>(x, work.reduced, first, kThreads, end, v);
      add_values(mine, v);
    }
    const LogSumExpPartial all = Reduce(storage[group]).Reduce(mine, MergeLogSumExp{});
    if (thread == 0) {
      store(work, row, blockIdx.y, gridDim.y, all);
    }
    if constexpr (kThreads == kBlock) __syncthreads();  // before storage is used again
  }
}

template <class T, int kVector>
Status launch_width(const Work& work, unsigned splits, void* stream) {
  const dim3 grid(grid_blocks(work.rows, kBlock / work.width), splits);
  const auto kernel = work.width == 8    ? reduce_rows_kernel<T, 8, kVector>
                      : work.width == 32 ? reduce_rows_kernel<T, 32, kVector>
                                         : reduce_rows_kernel<T, kBlock, kVector>;
  return launch(kernel, grid, kBlock, 0, stream, work);
}

template <class T>
Status launch_type(const LogSumExpPlan& plan, Work work, void* stream) {
  constexpr int kVector = 16 / sizeof(T);
  const auto splits = static_cast<unsigned>(plan.splits);
  if (!plan.vectors || reinterpret_cast<uintptr_t>(work.x) % 16 != 0) {
    return launch_width<T, 1>(work, splits, stream);
  }
  const int32_t last = work.reduced.count - 1;
  work.reduced.sizes[last] /= kVector;
  work.reduced.strides[last] = kVector;
  work.length /= kVector;
  work.split_length /= kVector;
  return launch_width<T, kVector>(work, splits, stream);
}

}  // namespace

Status reduce_rows(const LogSumExpPlan& plan, const void* x, void* out, LogSumExpPartial* partials,
                   void* stream) noexcept {
  const Work work = {
      x,         out,         partials,          plan.kept,  plan.kept_out, plan.reduced,
      plan.rows, plan.length, plan.split_length, plan.width, plan.out_dtype};
  switch (plan.dtype) {
    case DType::kFloat32:
      return launch_type<float>(plan, work, stream);
    case DType::kFloat16:
      return launch_type<__half>(plan, work, stream);
    case DType::kBFloat16:
      return launch_type<__nv_bfloat16>(plan, work, stream);
  }
  return error(Code::kInvalidType, "logsumexp of dtype %d; the codes are 0, 1 and 2",
               static_cast<int>(plan.dtype));
}

}  // namespace cutfuse::row_reduce
