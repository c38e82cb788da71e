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

/// Whether a column of 16 bits has so small a deviation beside its mean that its moments are to be
/// measured anew: those of values before rounding are not of what normalise() subtracts, as
/// roundings are not of either sign then, or of a constant all the same; those by sums of squares
/// (gemm/sm90/partials.cuh) are off by 2^-12 of the variance here, and nothing where they overflow.
__device__ bool is_coarse(const Merged& found, const Rows& n, DType dtype) {
  if (dtype == DType::kFloat32) return false;
  const double limit = 0x1p-5 * found.mean;
  const double variance = found.m2 * n.inverse;
  return !(variance >= limit * limit && variance < INFINITY);
}

/// kThreads threads of a block, one warp or all of it, merge one column. The order of sums is fixed
/// by the launch shape: deterministic.
template <int kThreads>
__global__ void __launch_bounds__(kBlock)
    finalise_kernel(const Partials partials, int64_t rows, int64_t columns, const Columns stored,
                    const BatchNormBuffers buffers) {
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
  const auto* of_column = reinterpret_cast<const float2*>(partials.data + column * partials.count);
  double origin = of_column[0].x;
  Distances mine;
#pragma unroll 8
  for (int64_t p = thread; p < partials.count; p += kThreads) {
    const float2 partial = of_column[p];
    const double count = rows_of_partial(p, rows, partials.rows);
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

/// Of partials that say of how many values they are.
struct Counted {
  Distances distances;
  double count = 0.0;
};

struct AddCounted {
  __device__ Counted operator()(const Counted& a, const Counted& b) const {
    return {AddDistances{}(a.distances, b.distances), a.count + b.count};
  }
};

/// As finalise_kernel with a warp for each channel, of counted partials: distances are from the
/// first finite mean of some values. The second convolution waits for it, so that nothing is read
/// late.
__global__ void __launch_bounds__(kBlock)
    finalise_counted_kernel(const CountedMoments* partials, int64_t partial_count, int64_t channels,
                            const BatchNormBuffers buffers, float* multipliers) {
  constexpr int kAtOnce = 9;  // partials of a lane; a device with 132 multiprocessors has 264
  using Reduce = cub::WarpReduce<Counted>;
  __shared__ typename Reduce::TempStorage storage[kBlock / 32];
  wait_for_previous_kernels();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t channel = int64_t(blockIdx.x) * (kBlock / 32) + warp;
  if (channel >= channels) return;
  const CountedMoments* of_channel = partials + channel * partial_count;
  const Running old = load_running(channel, buffers);
  const float weight =
      buffers.weight != nullptr ? load_value(buffers.weight, channel, buffers.affine_dtype) : 1.f;
  double origin = 0.0;
  Counted mine;
#pragma unroll 1
  for (int64_t first = 0; first < partial_count; first += 32 * kAtOnce) {
    CountedMoments some[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t p = first + i * 32 + lane;
      some[i] = p < partial_count ? of_channel[p] : CountedMoments{};
    }
    if (first == 0) {
      const bool mine_is = some[0].count > 0 && isfinite(some[0].mean);
      const uint32_t filled = __ballot_sync(0xffffffffu, mine_is);
      if (filled != 0) origin = __shfl_sync(0xffffffffu, some[0].mean, __ffs(filled) - 1);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (some[i].count == 0) continue;
      const double count = some[i].count, delta = some[i].mean - origin;
      mine.distances.sum = fma(count, delta, mine.distances.sum);
      mine.distances.squares += fma(count * delta, delta, double(some[i].m2));
      mine.count += count;
    }
  }
  const Counted all = Reduce(storage[warp]).Reduce(mine, AddCounted{});
  if (lane != 0) return;
  const Rows n(all.count);
  const Merged found = moments_of(origin, all.distances, n);
  write_statistics(channel, found.mean, found.m2, n, old, buffers);
  multipliers[channel] = weight * inverse_deviation(found.m2, n, buffers.eps);
  // With momentum None every channel reads the count.
  if (channel == 0 && buffers.num_batches_tracked != nullptr && buffers.momentum >= 0.0) {
    ++*buffers.num_batches_tracked;
  }
}

__global__ void count_kernel(int64_t* num_batches_tracked) {
  wait_for_previous_kernels();
  *num_batches_tracked += 1;
}

}  // namespace

Status finalise(const Partials& partials, int64_t rows, int64_t columns, const Columns& stored,
                const BatchNormBuffers& buffers, void* stream) noexcept {
  const auto kernel = partials.count <= 512 ? finalise_kernel<32> : finalise_kernel<kBlock>;
  const int64_t columns_of_block = partials.count <= 512 ? kBlock / 32 : 1;
  return launch(kernel, blocks(columns, columns_of_block), kBlock, 0, stream, partials, rows,
                columns, stored, buffers);
}

Status finalise(const CountedMoments* partials, int64_t partial_count, int64_t channels,
                const BatchNormBuffers& buffers, float* multipliers, void* stream) noexcept {
  if (Status status = launch(&finalise_counted_kernel, blocks(channels, kBlock / 32), kBlock, 0,
                             stream, partials, partial_count, channels, buffers, multipliers);
      !status.ok()) {
    return status;
  }
  if (buffers.num_batches_tracked == nullptr || buffers.momentum >= 0.0) return {};
  return launch(&count_kernel, 1, 1, 0, stream, buffers.num_batches_tracked);
}

}  // namespace cutfuse::batch_norm
