#include "skinny/multiply.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <utility>

#include "core/launch.h"
#include "device/copies.cuh"
#include "device/lane_sums.cuh"

namespace cutfuse::skinny {
namespace {

constexpr int kBlockColumns = 32;  // rows of the large operand that a block takes at once
constexpr int kGroup = 4;          // elements that a lane takes of each
constexpr int kStep = 32 * kGroup;

/// And a warp. Many rows of the small one would be read from shared memory for few sums.
constexpr int columns_of_warp(int rows) { return rows > 8 ? 8 : 4; }

/// Blocks of an SM, of which registers allow no more.
constexpr int blocks_of_sm(int64_t rows) { return rows > 12 ? 2 : 3; }

struct Rows {
  const void* data;
  int64_t row_stride, col_stride;
  int64_t count;
};

/// One launch. Strides of the result are in elements along both operands' rows.
struct Work {
  Rows few, many;
  int64_t k, part_k;
  float* out;
  int64_t few_stride, many_stride, slice_stride;
};

/// How rows are brought: as vectors; as vectors from the multiple of 16 bytes before their first
/// element on, which is then up to kGroup - 1 elements in; or one by one.
enum class Reading { kVectors, kShifted, kStrided };

/// Elements of a step that count.
template <Reading kReading>
inline constexpr int kUsed = kReading == Reading::kShifted ? kStep - kGroup : kStep;

template <class T>
__device__ __forceinline__ int shift_of(const T* row) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kGroup);
}

/// Shifts of consecutive rows; of rows that do not exist, whose sums nobody reads, any number.
template <class T>
struct Shifts {
  int first, stride;

  __device__ Shifts(const Rows& rows, int64_t row)
      : first(shift_of(static_cast<const T*>(rows.data) + row * rows.row_stride)),
        stride(static_cast<int>(rows.row_stride % kGroup)) {}
  __device__ int operator[](int i) const { return (first + i * stride) & (kGroup - 1); }
};

/// A warp has kStep elements from k on of a row brought to shared memory, zeros from `end` on.
template <class T, Reading kReading>
__device__ __forceinline__ void bring(T* to, const T* row, int64_t stride, int64_t k, int64_t end) {
  constexpr int kEach = kReading == Reading::kStrided ? 1 : 16 / int(sizeof(T));
  if constexpr (kReading == Reading::kShifted) k -= shift_of(row);
#pragma unroll
  for (int i = threadIdx.x % 32 * kEach; i < kStep; i += 32 * kEach) {
    const auto left = static_cast<int>(max(min(end - k - i, int64_t(kEach)), int64_t(0)));
    const T* from = left > 0 ? row + (k + i) * (kReading == Reading::kStrided ? stride : 1) : row;
    if constexpr (kReading == Reading::kShifted) {
      if (left == 0) from -= shift_of(row);
    }
    copy_async<kEach* int(sizeof(T))>(to + i, from, left * int(sizeof(T)));
  }
}

/// The same where all kStep elements exist; not for kStrided. `from` is the lane's own first one.
template <class T, Reading kReading>
__device__ __forceinline__ void bring_whole(T* to, const T* from) {
  constexpr int kEach = 16 / int(sizeof(T));
  const int lane = threadIdx.x % 32;
  if constexpr (kReading == Reading::kShifted) {
    from = reinterpret_cast<const T*>(reinterpret_cast<uintptr_t>(from) & ~uintptr_t(15));
  }
  if (kStep >= 32 * kEach || lane < kStep / kEach) copy_async<16>(to + lane * kEach, from, 16);
}

/// A lane's elements of a step of a row.
template <class T, Reading kReading>
__device__ __forceinline__ void read(const T* row, int shift, float (&v)[kGroup]) {
  const int lane = threadIdx.x % 32;
  if constexpr (kReading == Reading::kShifted) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int at = i * 32 + lane;
      v[i] = at < kUsed<kReading> ? static_cast<float>(row[shift + at]) : 0.f;
    }
  } else {
    struct alignas(sizeof(T) * kGroup) Group {
      T value[kGroup];
    };
    const Group group = reinterpret_cast<const Group*>(row)[lane];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] = static_cast<float>(group.value[i]);
  }
}

/// A warp sums kColumns rows of `many` with kRows of `few`, lanes along K. Both come to shared
/// memory ahead of their use, those of `few` for all warps of the block.
template <class T, int kRows, Reading kReading>
__global__ void __launch_bounds__(32 * kBlockColumns / columns_of_warp(kRows), blocks_of_sm(kRows))
    multiply_kernel(const __grid_constant__ Work work) {
  constexpr int kColumns = columns_of_warp(kRows);
  constexpr int kWarps = kBlockColumns / kColumns;
  constexpr int kStages = sizeof(T) == 4 ? 2 : 4;  // more of fp32 gain nothing
  alignas(16) __shared__ T few_ring[kStages][kRows][kStep];
  alignas(16) __shared__ T many_ring[kStages][kWarps * kColumns][kStep];
  wait_for_previous_kernels();
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int64_t column0 = (int64_t(blockIdx.x) * kWarps + warp) * kColumns;
  const int64_t row0 = int64_t(blockIdx.z) * kRows;
  const int64_t begin = int64_t(blockIdx.y) * work.part_k;
  const int64_t end = min(work.k, begin + work.part_k);
  const auto row_of = [](const Rows& rows, int64_t at) {
    return static_cast<const T*>(rows.data) + min(at, rows.count - 1) * rows.row_stride;
  };
  const T* first_column = static_cast<const T*>(work.many.data) + column0 * work.many.row_stride;
  const bool columns_exist = column0 + kColumns <= work.many.count;
  const auto bring_step = [&](int64_t k, int slot) {
    if (kReading != Reading::kStrided && columns_exist && k + kStep <= end) {
      const int64_t own = k + lane * (16 / int(sizeof(T)));
#pragma unroll
      for (int i = 0; i < (kRows + kWarps - 1) / kWarps; ++i) {
        const int r = warp + i * kWarps;
        if (kRows % kWarps != 0 && r >= kRows) break;
        bring_whole<T, kReading>(few_ring[slot][r], row_of(work.few, row0 + r) + own);
      }
      const T* from = first_column + own;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        bring_whole<T, kReading>(many_ring[slot][warp * kColumns + c], from);
        from += work.many.row_stride;
      }
      commit_copies();
      return;
    }
    for (int r = warp; r < kRows; r += kWarps) {
      bring<T, kReading>(few_ring[slot][r], row_of(work.few, row0 + r), work.few.col_stride, k,
                         end);
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      bring<T, kReading>(many_ring[slot][warp * kColumns + c], row_of(work.many, column0 + c),
                         work.many.col_stride, k, end);
    }
    commit_copies();
  };

  const Shifts<T> few_shifts(work.few, row0);
  const Shifts<T> many_shifts(work.many, column0);
  float sum[kRows * kColumns] = {};
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) bring_step(begin + s * kUsed<kReading>, s);
  int slot = 0;
  for (int64_t k = begin; k < end; k += kUsed<kReading>) {
    wait_for_copies<kStages - 2>();
    __syncthreads();
    bring_step(k + (kStages - 1) * kUsed<kReading>, slot == 0 ? kStages - 1 : slot - 1);
    float w[kColumns][kGroup];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      read<T, kReading>(many_ring[slot][warp * kColumns + c], many_shifts[c], w[c]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float x[kGroup];
      read<T, kReading>(few_ring[slot][r], few_shifts[r], x);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        float& total = sum[r * kColumns + c];
#pragma unroll
        for (int i = 0; i < kGroup; ++i) total = fmaf(w[c][i], x[i], total);
      }
    }
    slot = slot == kStages - 1 ? 0 : slot + 1;
  }

  constexpr int kSums = kRows * kColumns;
  sum_lanes<kSums>(sum);
  float* out = work.out + int64_t(blockIdx.y) * work.slice_stride;
  constexpr int kOwn = kSums >= 32 ? kSums / 32 : 1;
  constexpr int kSharers = kSums >= 32 ? 1 : 32 / kSums;
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const int i = lane / kSharers * kOwn + j;
    const int64_t row = row0 + i / kColumns;
    const int64_t column = column0 + i % kColumns;
    if (lane % kSharers == 0 && row < work.few.count && column < work.many.count) {
      out[row * work.few_stride + column * work.many_stride] = sum[j];
    }
  }
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T, int kRows, Reading kReading>
Status launch_rows(const Work& work, int32_t parts, void* stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(work.many.count, kBlockColumns)),
                  static_cast<unsigned>(parts),
                  static_cast<unsigned>(ceil_div(work.few.count, kRows)));
  constexpr int kThreads = 32 * kBlockColumns / columns_of_warp(kRows);
  return launch(multiply_kernel<T, kRows, kReading>, grid, kThreads, 0, stream, work);
}

template <class T, Reading kReading>
Status launch_reading(const Work& work, int32_t parts, void* stream) {
  const int64_t rows = work.few.count;
  if (rows == 1) return launch_rows<T, 1, kReading>(work, parts, stream);
  if (rows == 2) return launch_rows<T, 2, kReading>(work, parts, stream);
  if (rows <= 4) return launch_rows<T, 4, kReading>(work, parts, stream);
  if (rows <= 8) return launch_rows<T, 8, kReading>(work, parts, stream);
  if (rows <= 12) return launch_rows<T, 12, kReading>(work, parts, stream);
  return launch_rows<T, 16, kReading>(work, parts, stream);
}

Status launch_floats(const Work& work, int32_t parts, void* stream) {
  const auto lie_together = [](const Rows& rows) { return rows.col_stride == 1; };
  const auto aligned = [](const Rows& rows) {
    return (rows.row_stride % kGroup == 0 || rows.count == 1) &&
           reinterpret_cast<uintptr_t>(rows.data) % 16 == 0;
  };
  if (!lie_together(work.few) || !lie_together(work.many)) {
    return launch_reading<float, Reading::kStrided>(work, parts, stream);
  }
  return aligned(work.few) && aligned(work.many)
             ? launch_reading<float, Reading::kVectors>(work, parts, stream)
             : launch_reading<float, Reading::kShifted>(work, parts, stream);
}

}  // namespace

Shares select_parts(int64_t m, int64_t n, int64_t k, int32_t sm_count) noexcept {
  const int64_t blocks = ceil_div(std::max(m, n), kBlockColumns);
  const int64_t at_once = int64_t(sm_count) * blocks_of_sm(std::min(m, n));
  Shares best{1, 0.0};
  // The second pass reads at most 16 slices; a part shorter than 512 of K is not worth one.
  for (int32_t parts = 1; parts <= 16; ++parts) {
    if (parts > 1 && ceil_div(k, parts) < 4 * kStep) break;
    const auto waves = static_cast<double>(ceil_div(blocks * parts, at_once));
    const auto steps = static_cast<double>(ceil_div(ceil_div(k, parts), kStep));
    const double length = waves * (steps + 2.0) + 0.25 * parts;
    if (parts == 1 || length < best.steps) best = {parts, length};
  }
  return best;
}

Status multiply(const ConstMatrix& x, const ConstMatrix& weight, int64_t m, int64_t n, int64_t k,
                int32_t parts, const Matrix& out, int64_t slice_stride, void* stream) noexcept {
  Work work{{x.data, x.row_stride, x.col_stride, m},
            {weight.data, weight.row_stride, weight.col_stride, n},
            k,
            ceil_div(ceil_div(k, parts), kStep) * kStep,
            static_cast<float*>(out.data),
            out.row_stride,
            1,
            slice_stride};
  if (m > n) {
    std::swap(work.few, work.many);
    std::swap(work.few_stride, work.many_stride);
  }
  switch (x.dtype) {
    case DType::kFloat32:
      return launch_floats(work, parts, stream);
    case DType::kFloat16:
      return launch_reading<__half, Reading::kVectors>(work, parts, stream);
    default:
      return launch_reading<__nv_bfloat16, Reading::kVectors>(work, parts, stream);
  }
}

}  // namespace cutfuse::skinny
