/// \file
/// Partials of a logsumexp, of a GEMM's epilogue or of split rows -> the result.
#include <cub/block/block_reduce.cuh>
#include <cub/warp/warp_reduce.cuh>
#include <type_traits>

#include "core/launch.h"
#include "device/online_logsumexp.h"
#include "device/values.cuh"
#include "row_reduce/kernels.h"

namespace cutfuse::row_reduce {
namespace {

template <int kThreads>
__global__ void __launch_bounds__(kBlock)
    merge_kernel(const LogSumExpPartial* partials, int64_t rows, int64_t count, void* out,
                 DType out_dtype) {
  using Reduce = std::conditional_t<kThreads <= 32, cub::WarpReduce<LogSumExpPartial, kThreads>,
                                    cub::BlockReduce<LogSumExpPartial, kBlock>>;
  constexpr int kRows = kBlock / kThreads;
  __shared__ typename Reduce::TempStorage storage[kRows];
  wait_for_previous_kernels();
  const int group = threadIdx.x / kThreads;
  const int thread = threadIdx.x % kThreads;
  for (int64_t row = int64_t(blockIdx.x) * kRows + group; row < rows;
       row += int64_t(gridDim.x) * kRows) {
    const LogSumExpPartial* of_row = partials + row * count;
    LogSumExpPartial mine = empty_logsumexp();
#pragma unroll 4
    for (int64_t p = thread; p < count; p += kThreads) mine = MergeLogSumExp{}(mine, of_row[p]);
    const LogSumExpPartial all = Reduce(storage[group]).Reduce(mine, MergeLogSumExp{});
    if (thread == 0) {
      store_value(out, row, logsumexp_of(all), out_dtype);
    }
    if constexpr (kThreads == kBlock) __syncthreads();  // before storage is used again
  }
}

}  // namespace

Status merge(const LogSumExpPartial* partials, int64_t rows, int64_t count, void* out,
             DType out_dtype, void* stream) noexcept {
  const int threads = count <= 64 ? 8 : count <= 1024 ? 32 : kBlock;
  const auto kernel = threads == 8    ? merge_kernel<8>
                      : threads == 32 ? merge_kernel<32>
                                      : merge_kernel<kBlock>;
  return launch(kernel, grid_blocks(rows, kBlock / threads), kBlock, 0, stream, partials, rows,
                count, out, out_dtype);
}

}  // namespace cutfuse::row_reduce
