/// \file
/// Partials of the GEMM's epilogue -> batch statistics and running statistics.
#include <cub/block/block_reduce.cuh>
#include <cub/warp/warp_reduce.cuh>
#include <type_traits>

#include "batch_norm/kernels.h"
#include "batch_norm/statistics.cuh"
#include "core/launch.h"
#include "device/moments.h"
#include "device/values.cuh"

namespace cutfuse::batch_norm {
namespace {

constexpr int kBlock = 128;

/// As Moments, in fp64: the roundings of up to M / 64 merges would show in the mean.
struct Counted {
  double mean;
  double m2;
  double count;
};

struct MergeCounted {
  __device__ Counted operator()(const Counted& a, const Counted& b) const {
    const double count = a.count + b.count;
    const double weight = count > 0.0 ? b.count / count : 0.0;
    const double delta = b.mean - a.mean;
    return {a.mean + delta * weight, a.m2 + b.m2 + delta * delta * (a.count * weight), count};
  }
};

/// Sums of distances from a column's first value, or its first partial's mean.
struct Distances {
  double sum = 0.0;
  double squares = 0.0;
};

struct AddDistances {
  __device__ Distances operator()(const Distances& a, const Distances& b) const {
    return {a.sum + b.sum, a.squares + b.squares};
  }
};

__device__ Merged moments_of(double origin, const Distances& all, const Rows& n) {
  const double m2 = all.squares - all.sum * all.sum * n.inverse;
  return {origin + all.sum * n.inverse, m2 < 0.0 ? 0.0 : m2};  // NaN stays
}

/// Whether a column that was rounded to 16 bits has few steps of its values to a deviation: its
/// roundings are not of either sign then, or of a constant all the same, and what was measured
/// before them is not what normalise() subtracts.
__device__ bool is_coarse(const Merged& found, const Rows& n, DType dtype) {
  if (dtype == DType::kFloat32) return false;
  const double half_step = dtype == DType::kBFloat16 ? 0x1p-9 : 0x1p-12;
  const double limit = 16 * half_step * found.mean;
  return found.m2 * n.inverse < limit * limit;
}

/// kThreads threads of a block, one warp or all of it, merge one column. The order of sums is fixed
/// by the launch shape: deterministic.
template <int kThreads>
__global__ void __launch_bounds__(kBlock)
    finalise_kernel(const Moments* partials, int64_t partial_count, int64_t rows, int64_t columns,
                    const Columns stored, const BatchNormBuffers buffers) {
  using Reduce = std::conditional_t<kThreads == 32, cub::WarpReduce<Distances>,
                                    cub::BlockReduce<Distances, kBlock>>;
  __shared__ typename Reduce::TempStorage storage[kBlock / kThreads];
  __shared__ bool coarse[kBlock / kThreads];
  const auto sync = [] {
    if constexpr (kThreads == 32) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  };
  wait_for_previous_kernels();
  const int group = threadIdx.x / kThreads;
  const int thread = threadIdx.x % kThreads;
  const int64_t column = int64_t(blockIdx.x) * (kBlock / kThreads) + group;
  if (column >= columns) {
    return;  // whole warps when kThreads is 32; never when the block has one column
  }
  const Rows n(static_cast<double>(rows));
  const auto* of_column = reinterpret_cast<const float2*>(partials + column * partial_count);
  double origin = of_column[0].x;
  Distances mine;
#pragma unroll 8
  for (int64_t p = thread; p < partial_count; p += kThreads) {
    const float2 partial = of_column[p];
    const double count = rows_of_partial(p, rows);
    const double delta = partial.x - origin;
    mine.sum = fma(count, delta, mine.sum);
    mine.squares += fma(count * delta, delta, static_cast<double>(partial.y));
  }
  Merged found = moments_of(origin, Reduce(storage[group]).Reduce(mine, AddDistances{}), n);
  if (thread == 0) coarse[group] = is_coarse(found, n, stored.dtype);
  sync();
  if (coarse[group]) {
    const auto value = [&](int64_t row) {
      const int64_t at = row / stored.together * stored.jump +
                         row % stored.together * stored.row_stride + column * stored.column_stride;
      return static_cast<double>(load_value(stored.data, at, stored.dtype));
    };
    origin = value(0);
    mine = {};
#pragma unroll 8
    for (int64_t row = thread; row < rows; row += kThreads) {
      const double delta = value(row) - origin;
      mine.sum += delta;
      mine.squares = fma(delta, delta, mine.squares);
    }
    found = moments_of(origin, Reduce(storage[group]).Reduce(mine, AddDistances{}), n);
  }
  if (thread != 0) {
    return;
  }
  write_statistics(column, found.mean, found.m2, n, load_running(column, buffers), buffers);
}

unsigned blocks(int64_t items, int64_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

/// As finalise_kernel with a warp for each channel, of partials that say of how many values they
/// are.
__global__ void __launch_bounds__(kBlock)
    finalise_counted_kernel(const CountedMoments* partials, int64_t partial_count, int64_t channels,
                            const BatchNormBuffers buffers, float* multipliers) {
  using Reduce = cub::WarpReduce<Counted>;
  __shared__ typename Reduce::TempStorage storage[kBlock / 32];
  wait_for_previous_kernels();
  const int warp = threadIdx.x / 32;
  const int64_t channel = int64_t(blockIdx.x) * (kBlock / 32) + warp;
  if (channel >= channels) {
    return;
  }
  Counted mine{0.0, 0.0, 0.0};
  for (int64_t p = threadIdx.x % 32; p < partial_count; p += 32) {
    const CountedMoments partial = partials[channel * partial_count + p];
    mine = MergeCounted{}(mine, {partial.mean, partial.m2, double(partial.count)});
  }
  const Counted all = Reduce(storage[warp]).Reduce(mine, MergeCounted{});
  if (threadIdx.x % 32 != 0) {
    return;
  }
  write_statistics(channel, all.mean, all.m2, Rows(all.count), load_running(channel, buffers),
                   buffers);
  const float weight =
      buffers.weight != nullptr ? load_value(buffers.weight, channel, buffers.affine_dtype) : 1.f;
  multipliers[channel] = weight * buffers.save_invstd[channel];
}

__global__ void count_kernel(int64_t* num_batches_tracked) {
  wait_for_previous_kernels();
  *num_batches_tracked += 1;
}

}  // namespace

Status finalise(const Moments* partials, int64_t partial_count, int64_t rows, int64_t columns,
                const Columns& stored, const BatchNormBuffers& buffers, void* stream) noexcept {
  const auto kernel = partial_count <= 512 ? finalise_kernel<32> : finalise_kernel<kBlock>;
  const int64_t columns_of_block = partial_count <= 512 ? kBlock / 32 : 1;
  return launch(kernel, blocks(columns, columns_of_block), kBlock, 0, stream, partials,
                partial_count, rows, columns, stored, buffers);
}

Status finalise(const CountedMoments* partials, int64_t partial_count, int64_t channels,
                const BatchNormBuffers& buffers, float* multipliers, void* stream) noexcept {
  if (Status status = launch(&finalise_counted_kernel, blocks(channels, kBlock / 32), kBlock, 0,
                             stream, partials, partial_count, channels, buffers, multipliers);
      !status.ok()) {
    return status;
  }
  if (buffers.num_batches_tracked == nullptr) return {};
  // A launch of its own: with momentum None every channel reads the count.
  return launch(&count_kernel, 1, 1, 0, stream, buffers.num_batches_tracked);
}

}  // namespace cutfuse::batch_norm
