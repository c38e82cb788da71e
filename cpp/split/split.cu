/// \file
/// fp32 -> one or two scaled fp16 planes. One pass along contiguous rows of up to 8192 elements,
/// which stay in registers between the maximum and the conversion; two reads otherwise.
#include "cutfuse/split.h"

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "core/checked_math.h"
#include "core/current_device.h"
#include "core/launch.h"
#include "core/status.h"
#include "split/convert.cuh"
#include "split/planes.h"
#include "split/split.h"

namespace cutfuse {
namespace {

using planes::kGroup;
using planes::Magnitude;
using planes::make_work;
using planes::Planes;
using planes::Source;
using planes::Work;

/// Eight values of a row from element `begin`; past k they are zero.
template <bool kVector>
__device__ void load_group(const float* row, int64_t stride, int64_t begin, int64_t k,
                           float (&x)[kGroup]) {
  if (kVector && begin + kGroup <= k) {
    const float4 a = *reinterpret_cast<const float4*>(row + begin);
    const float4 b = *reinterpret_cast<const float4*>(row + begin + 4);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    x[i] = begin + i < k ? row[(begin + i) * stride] : 0.f;
  }
}

/// By the first block of a launch.
__device__ __forceinline__ void clear(const Counters& counters) {
  if (blockIdx.x != 0) return;
  for (int i = threadIdx.x; i < counters.count; i += blockDim.x) counters.data[i] = 0;
}

__device__ __forceinline__ void store_group(const Planes& to, int64_t row, int64_t begin, uint4 hi,
                                            uint4 lo) {
  const int64_t at = row * to.leading + begin;
  *reinterpret_cast<uint4*>(to.hi + at) = hi;
  if (to.lo != nullptr) *reinterpret_cast<uint4*>(to.lo + at) = lo;
}

/// Converts and stores a row of which each of kThreads threads has every kThreads-th group.
template <int kThreads, int kGroups>
__device__ __forceinline__ void store_row(const float (&x)[kGroups][kGroup], int exponent,
                                          bool nonfinite, const Planes& to, int64_t row,
                                          int thread) {
  const bool plain = !nonfinite && exponent <= 127;
  uint4 hi, lo;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int64_t begin = (int64_t(g) * kThreads + thread) * kGroup;
    if (begin >= to.leading) break;
    if (plain) {
      planes::convert<true>(x[g], exponent, hi, lo);
    } else {
      planes::convert(x[g], exponent, hi, lo);
    }
    store_group(to, row, begin, hi, lo);
  }
}

constexpr int kBlock = 256;

/// kThreads threads convert one row of `first` (the blocks before first_blocks) or of `second`; up
/// to kGroups groups of it stay in their registers. kGroups == 0: the row is read twice.
template <int kThreads, int kGroups, bool kVector>
__global__ void __launch_bounds__(kBlock)
    split_rows(const __grid_constant__ Work first, const __grid_constant__ Work second,
               unsigned first_blocks, const Counters counters) {
  wait_for_previous_kernels();
  clear(counters);
  const bool is_first = blockIdx.x < first_blocks;
  const Source source = is_first ? first.source : second.source;
  const Planes planes = is_first ? first.planes : second.planes;
  const unsigned block = is_first ? blockIdx.x : blockIdx.x - first_blocks;
  const int64_t row = int64_t(block) * (kBlock / kThreads) + threadIdx.x / kThreads;
  if (row >= source.rows) {
    return;  // whole warps when kThreads is 32; never when the block has one row
  }
  const int thread = threadIdx.x % kThreads;
  const float* x = static_cast<const float*>(source.x.data) + row * source.x.row_stride;
  const int64_t stride = source.x.col_stride;
  constexpr int kKept = kGroups > 0 ? kGroups : 1;
  float values[kKept][kGroup];
  Magnitude magnitude;
  if constexpr (kGroups > 0) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      load_group<kVector>(x, stride, (int64_t(g) * kThreads + thread) * kGroup, source.k,
                          values[g]);
    }
    magnitude = planes::magnitude_of(values);
  } else {
    for (int64_t begin = thread * kGroup; begin < source.k; begin += kThreads * kGroup) {
      load_group<kVector>(x, stride, begin, source.k, values[0]);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) magnitude.add(values[0][i]);
    }
  }
  magnitude = planes::merge_row<kThreads>(magnitude);
  const int exponent = planes::scale_exponent(magnitude.bits);
  if (thread == 0) {
    planes.words[row] = planes::word_of(exponent, magnitude.nonfinite);
  }
  if constexpr (kGroups > 0) {
    store_row<kThreads>(values, exponent, magnitude.nonfinite, planes, row, thread);
  } else {
    uint4 hi, lo;
    for (int64_t begin = thread * kGroup; begin < planes.leading; begin += kThreads * kGroup) {
      load_group<kVector>(x, stride, begin, source.k, values[0]);
      planes::convert(values[0], exponent, hi, lo);
      store_group(planes, row, begin, hi, lo);
    }
  }
}

constexpr int kStrip = 32;  // rows of a block of split_columns, and warps that share them

/// For sources whose columns are contiguous (a transposed view): a warp reads 32 rows at one k, so
/// both reads are coalesced; the planes' rows leave through shared memory in runs of 512 bytes.
__global__ void __launch_bounds__(kStrip* kStrip)
    split_columns(const Source source, const Planes planes, const Counters counters) {
  __shared__ uint4 staged[2][kStrip][kStrip + 1];
  __shared__ uint32_t bits[kStrip];
  __shared__ uint32_t nonfinite;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t first_row = int64_t(blockIdx.x) * kStrip;
  const int64_t row = first_row + lane;
  const bool inside = row < source.rows;
  const float* x =
      static_cast<const float*>(source.x.data) + (inside ? row : first_row) * source.x.row_stride;
  const int64_t stride = source.x.col_stride;

  wait_for_previous_kernels();
  clear(counters);
  if (threadIdx.x < kStrip) bits[threadIdx.x] = 0;
  if (threadIdx.x == 0) nonfinite = 0;
  __syncthreads();
  Magnitude magnitude;
  for (int64_t begin = warp * kGroup; begin < source.k; begin += kStrip * kGroup) {
    float values[kGroup];
    load_group<false>(x, stride, begin, source.k, values);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) magnitude.add(values[i]);
  }
  atomicMax(&bits[lane], magnitude.bits);
  if (magnitude.nonfinite) atomicOr(&nonfinite, 1u << lane);
  __syncthreads();
  const int exponent = planes::scale_exponent(bits[lane]);
  if (warp == 0 && inside) {
    planes.words[row] = planes::word_of(exponent, (nonfinite >> lane & 1) != 0);
  }

  for (int64_t begin = 0; begin < planes.leading; begin += kStrip * kGroup) {
    float values[kGroup];
    uint4 hi, lo;
    load_group<false>(x, stride, begin + warp * kGroup, source.k, values);
    planes::convert(values, exponent, hi, lo);
    staged[0][lane][warp] = hi;
    staged[1][lane][warp] = lo;
    __syncthreads();
    const int64_t at = begin + lane * kGroup;
    if (first_row + warp < source.rows && at < planes.leading) {
      store_group(planes, first_row + warp, at, staged[0][warp][lane], staged[1][warp][lane]);
    }
    __syncthreads();
  }
}

template <int kThreads, int kGroups>
Status launch_rows(const Work& first, const Work* second, bool vector, const Counters& counters,
                   void* stream) {
  const auto blocks = [](const Work& work) {
    constexpr int64_t kRows = kBlock / kThreads;
    return static_cast<unsigned>((work.source.rows + kRows - 1) / kRows);
  };
  const unsigned first_blocks = blocks(first);
  const dim3 grid(first_blocks + (second != nullptr ? blocks(*second) : 0));
  return launch(vector ? split_rows<kThreads, kGroups, true> : split_rows<kThreads, kGroups, false>,
                grid, kBlock, 0, stream, first, second != nullptr ? *second : first, first_blocks,
                counters);
}

Status launch_rows(const Work& first, const Work* second, bool vector, const Counters& counters,
                   void* stream) {
  const int64_t k = first.source.k;
  const auto launch_by = [&](auto kernel) {
    return kernel(first, second, vector, counters, stream);
  };
  if (k <= 32 * kGroup) return launch_by(launch_rows<32, 1>);
  if (k <= 32 * kGroup * 4) return launch_by(launch_rows<32, 4>);
  if (k <= kBlock * kGroup) return launch_by(launch_rows<kBlock, 1>);
  if (k <= kBlock * kGroup * 2) return launch_by(launch_rows<kBlock, 2>);
  if (k <= kBlock * kGroup * 4) return launch_by(launch_rows<kBlock, 4>);
  if (k <= kBlock * kGroup * 8) return launch_by(launch_rows<kBlock, 8>);
  return launch_by(launch_rows<kBlock, 0>);
}

enum class Reading { kColumns, kRows, kRowVectors };

Reading reading_of(const Source& source) {
  const ConstMatrix& x = source.x;
  if (x.row_stride == 1 && x.col_stride != 1 && source.rows > 1) {
    return Reading::kColumns;
  }
  return planes::reads_vectors(x) ? Reading::kRowVectors : Reading::kRows;
}

Status launch_work(const Work& first, const Work* second, Reading reading, const Counters& counters,
                   void* stream) {
  if (reading != Reading::kColumns) {
    return launch_rows(first, second, reading == Reading::kRowVectors, counters, stream);
  }
  const dim3 grid(static_cast<unsigned>((first.source.rows + kStrip - 1) / kStrip));
  return launch(split_columns, grid, kStrip * kStrip, 0, stream, first.source, first.planes,
                counters);
}

}  // namespace

planes::Work planes::make_work(const SplitJob& job, int64_t k, int32_t count) noexcept {
  const int64_t leading = (k + kGroup - 1) / kGroup * kGroup;
  auto* hi = static_cast<__half*>(job.planes);
  return {{job.x, std::min(job.rows, job.first_rows), k},
          {hi, count > 1 ? hi + job.rows * leading : nullptr, leading, job.words}};
}

bool planes::reads_vectors(const ConstMatrix& x) noexcept {
  return x.col_stride == 1 && x.row_stride % 4 == 0 &&
         reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

Status planes_layout(int64_t rows, int64_t k, int32_t count, PlanesLayout* layout) noexcept {
  if (rows < 0 || k < 0) {
    return error(Code::kInvalidValue, "planes of a %lld x %lld matrix: sizes must not be negative",
                 static_cast<long long>(rows), static_cast<long long>(k));
  }
  if (count != 1 && count != 2) {
    return error(Code::kInvalidValue, "%d planes; a matrix has 1 (tf32) or 2 (ieee)", count);
  }
  int64_t leading = 0;
  int64_t elements = 0;
  int64_t bytes = 0;
  int64_t words = 0;
  if (!checked_round_up(k, kGroup, &leading) || !checked_multiply(rows, leading, &elements) ||
      !checked_multiply(elements, count * int64_t(sizeof(__half)), &bytes) ||
      !checked_round_up(rows, 4, &words) || !checked_multiply(words, 4, &words)) {
    return error(Code::kInvalidValue, "planes of a %lld x %lld matrix need more than 2^63 bytes",
                 static_cast<long long>(rows), static_cast<long long>(k));
  }
  *layout = {leading, bytes, words};
  return {};
}

Status split(const SplitJob& first, const SplitJob* second, int64_t k, int32_t count,
             const Counters& counters, void* stream) noexcept {
  const Work one = make_work(first, k, count);
  const Reading reading = reading_of(one.source);
  if (second == nullptr) {
    return launch_work(one, nullptr, reading, counters, stream);
  }
  const Work two = make_work(*second, k, count);
  const Reading reading_two = reading_of(two.source);
  if (reading == reading_two && reading != Reading::kColumns) {
    return launch_work(one, &two, reading, counters, stream);
  }
  if (Status status = launch_work(one, nullptr, reading, counters, stream); !status.ok()) {
    return status;
  }
  return launch_work(two, nullptr, reading_two, {}, stream);
}

Status split(const ConstMatrix& x, int64_t rows, int64_t k, int32_t count, void* planes,
             int32_t* words, const DeviceProps& device, void* stream) noexcept {
  PlanesLayout layout;
  if (Status status = planes_layout(rows, k, count, &layout); !status.ok()) return status;
  if (rows == 0) {
    return {};
  }
  CUTFUSE_CHECK(rows < int64_t(1) << 31, Code::kNotSupported,
                "split of %lld rows; at most 2^31 - 1 are supported, split the matrix",
                static_cast<long long>(rows));
  CurrentDevice current;
  if (Status status = current.enter(device.index); !status.ok()) return status;
  return split(SplitJob{x, rows, planes, words}, nullptr, k, count, {}, stream);
}

}  // namespace cutfuse
