/// \file
/// The normalise pass: affine step and second program over a stored result, in place.
#include <algorithm>

#include "batch_norm/kernels.h"
#include "batch_norm/statistics.cuh"
#include "core/launch.h"
#include "core/status.h"
#include "device/gathering.h"
#include "device/values.cuh"
#include "program/executor.cuh"
#include "program/row_tile.cuh"

namespace cutfuse::batch_norm {
namespace {

using namespace row_tile;  // NOLINT: this file is one pass over row tiles

constexpr int kThreads = kLanes * kWarps;
constexpr int kMaxPartials = 32;

/// What is multiplied and added in a block's columns.
template <int kBlockColumns>
struct Terms {
  float mean[kBlockColumns], scale[kBlockColumns], shift[kBlockColumns];
};

/// By all threads: the terms of this block's columns. kMerges: their partials are merged here,
/// which every block of a column does; the first one also writes.
template <bool kMerges, int kBlockColumns>
__device__ void make_terms(const Partials& partials, int64_t rows, int64_t columns,
                           const BatchNormBuffers& buffers, Terms<kBlockColumns>* terms) {
  constexpr int kMergers = kMerges ? kThreads / kBlockColumns : 1;
  static_assert(kThreads % kBlockColumns == 0);
  const int own = threadIdx.x / kMergers;
  const int64_t column = int64_t(blockIdx.x) * kBlockColumns + own;
  const int64_t inside = min(column, columns - 1);
  float mean, invstd;
  if constexpr (kMerges) {
    const int merger = threadIdx.x % kMergers;
    const Rows n(static_cast<double>(rows));
    const auto merged = merge_partials<kMergers>(partials.data + inside * partials.column_stride,
                                                 partials.stride, static_cast<int>(partials.count),
                                                 partials.rows, merger, n, static_cast<int>(rows));
    mean = static_cast<float>(merged.mean);
    invstd = inverse_deviation(merged.m2, n, buffers.eps);
    if (merger == 0 && blockIdx.y == 0 && column < columns) {
      write_statistics(column, merged.mean, merged.m2, n, load_running(column, buffers), buffers);
    }
  } else if (own < kBlockColumns) {
    mean = buffers.save_mean[inside];
    invstd = buffers.save_invstd[inside];
  }
  if (own < kBlockColumns) {
    const auto affine = [&](const void* values, float otherwise) {
      return values != nullptr ? load_value(values, inside, buffers.affine_dtype) : otherwise;
    };
    terms->mean[own] = mean;
    terms->scale[own] = invstd * affine(buffers.weight, 1.f);
    terms->shift[own] = affine(buffers.bias, 0.f);
  }
  __syncthreads();
}

/// Whether there is nothing to do; else raises the count of batches.
__device__ bool is_done(const Partials& partials, int64_t* num_batches_tracked) {
  if (partials.gathering != nullptr &&
      *partials.gathering == static_cast<uint32_t>(Gathering::kTogether)) {
    return true;
  }
  if (num_batches_tracked != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    ++*num_batches_tracked;
  }
  return false;
}

struct Arguments {
  Matrix out;
  int64_t rows, columns;
  Partials partials;
  BatchNormBuffers buffers;
};

template <bool kVector, bool kMerges>
__global__ void __launch_bounds__(kThreads)
    normalise_kernel(const __grid_constant__ Arguments a,
                     const __grid_constant__ DeviceProgram after) {
  constexpr int kBlockColumns = kLanes * kColumns;
  __shared__ Terms<kBlockColumns> terms;
  wait_for_previous_kernels();
  if (is_done(a.partials, a.buffers.num_batches_tracked)) return;
  make_terms<kMerges>(a.partials, a.rows, a.columns, a.buffers, &terms);
  const int first = threadIdx.x % kLanes * kColumns;
  Coordinates at{0, int64_t(blockIdx.x) * kBlockColumns + first, a.columns};
  for_each_piece(a.rows, [&](int64_t row0) {
    at.row0 = row0;
    float v[Coordinates::kSize];
    load<kVector>(a.out, at, v);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int n = first + i;
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        float& value = v[index(i / 2, r, i % 2)];
        value = fmaf(value - terms.mean[n], terms.scale[n], terms.shift[n]);
      }
    }
    execute(after, v, at);
    store<kVector>(a.out, at, v);
  });
}

struct Bounds {
  float lowest = -INFINITY;
  float highest = INFINITY;
};

/// Where bounds are all that follows: 16 bytes a lane and row, and few instructions, as a call of a
/// large layer of 16 bits takes as long as its energy (benchmarks/results/README.md).
template <DType kDType, bool kMerges, bool kBounds>
__global__ void __launch_bounds__(kThreads)
    normalise_words_kernel(const __grid_constant__ Arguments a, const Bounds bounds) {
  constexpr bool kNarrow = kDType != DType::kFloat32;
  constexpr int kValues = kNarrow ? 8 : 4;
  constexpr int kBlockColumns = kLanes * kValues;
  constexpr int kBytes = kNarrow ? 2 : 4;
  __shared__ Terms<kBlockColumns> terms;
  wait_for_previous_kernels();
  if (is_done(a.partials, a.buffers.num_batches_tracked)) return;
  make_terms<kMerges>(a.partials, a.rows, a.columns, a.buffers, &terms);
  const int first = threadIdx.x % kLanes * kValues;
  const int64_t column = int64_t(blockIdx.x) * kBlockColumns + first;
  if (column >= a.columns) return;
  float mean[kValues], scale[kValues], shift[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    mean[i] = terms.mean[first + i];
    scale[i] = terms.scale[first + i];
    shift[i] = terms.shift[first + i];
  }
  const auto normalised = [&](float value, int i) {
    value = fmaf(value - mean[i], scale[i], shift[i]);
    return kBounds ? minimum(maximum(value, bounds.lowest), bounds.highest) : value;
  };
  const auto normalise = [&](uint4* four) {
    auto* words = reinterpret_cast<uint32_t*>(four);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (kNarrow) {
        const float2 pair = unpack_pair(words[w], kDType);
        words[w] = pack_pair(normalised(pair.x, 2 * w), normalised(pair.y, 2 * w + 1), kDType);
      } else {
        words[w] = __float_as_uint(normalised(__uint_as_float(words[w]), w));
      }
    }
  };
  const int64_t step = a.out.row_stride * kBytes;
  char* const start = static_cast<char*>(a.out.data) + column * kBytes;
  for_each_piece(a.rows, [&](int64_t row0) {
    char* const last = start + row0 * step;
    const int count = static_cast<int>(min(row0 + 1, int64_t(kRowsAtOnce)));
    uint4 v[kRowsAtOnce];
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      if (r < count) v[r] = *reinterpret_cast<const uint4*>(last - r * step);
    }
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      normalise(&v[r]);
      if (r < count) *reinterpret_cast<uint4*>(last - r * step) = v[r];
    }
  });
}

template <DType kDType, bool kMerges>
auto words_kernel(bool bounds) {
  return bounds ? normalise_words_kernel<kDType, kMerges, true>
                : normalise_words_kernel<kDType, kMerges, false>;
}

auto words_kernel(DType dtype, bool merges, bool bounds) {
  return dtype == DType::kFloat16    ? words_kernel<DType::kFloat16, false>(bounds)
         : dtype == DType::kBFloat16 ? words_kernel<DType::kBFloat16, false>(bounds)
         : merges                    ? words_kernel<DType::kFloat32, true>(bounds)
                                     : words_kernel<DType::kFloat32, false>(bounds);
}

/// The rows of a result are few: a block takes many of them, or merging would cost more than it
/// saves.
constexpr unsigned kMergingRowBlocks = 8;

}  // namespace

Status normalise(const Matrix& out, int64_t rows, int64_t columns, const Partials& partials,
                 const BatchNormBuffers& buffers, const DeviceProgram& after, int32_t sm_count,
                 void* stream) noexcept {
  if (columns > kMaxColumns) {
    return error(Code::kNotSupported, "batch_norm over %lld channels: at most %lld are supported",
                 static_cast<long long>(columns), static_cast<long long>(kMaxColumns));
  }
  // The count of batches is raised by one block: no other may read it then. finalise() also looks
  // at what was rounded.
  const bool merges =
      partials.count <= kMaxPartials && buffers.momentum >= 0.0 && out.dtype == DType::kFloat32;
  if (!merges) {
    const Columns stored{out.data, out.dtype, 1, out.row_stride, rows, 0};
    if (Status status = finalise(partials, rows, columns, stored, buffers, stream); !status.ok()) {
      return status;
    }
  }
  const auto blocks = [&](int64_t block_columns) {
    dim3 blocks = grid(rows, columns, sm_count, block_columns);
    if (merges) blocks.y = std::min(blocks.y, kMergingRowBlocks);
    return blocks;
  };
  const Arguments arguments{out, rows, columns, partials, buffers};
  Bounds bounds;
  const bool bounded =
      after.count == 0 ||
      (after.count == 1 && bounds_of(after.steps[0], &bounds.lowest, &bounds.highest));
  const int64_t values = 16 / size_of(out.dtype);
  const bool vectors = allows_vectors(out, columns);
  if (bounded && vectors && columns % values == 0 && out.row_stride % values == 0) {
    const auto kernel = words_kernel(out.dtype, merges, after.count != 0);
    return cutfuse::launch(kernel, blocks(kLanes * values), kThreads, 0, stream, arguments, bounds);
  }
  const auto kernel =
      merges ? (vectors ? normalise_kernel<true, true> : normalise_kernel<false, true>)
             : (vectors ? normalise_kernel<true, false> : normalise_kernel<false, false>);
  return cutfuse::launch(kernel, blocks(kLanes * kColumns), kThreads, 0, stream, arguments, after);
}

}  // namespace cutfuse::batch_norm
