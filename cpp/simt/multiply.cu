#include "simt/multiply.h"

#include <algorithm>
#include <iterator>

#include "core/launch.h"
#include "program/executor.cuh"

namespace cutfuse::simt {
namespace {

/// A group of threads holds a tile of sums, kRows x kColumns of them each, and takes kStep of K at
/// once. `kBlocks` of these fit an SM.
template <int kTileM_, int kTileN_, int kRows_, int kColumns_, int kStep_, int kGroups_,
          int kBlocks_>
struct Layout {
  static constexpr int kTileM = kTileM_, kTileN = kTileN_, kRows = kRows_, kColumns = kColumns_;
  static constexpr int kStep = kStep_, kGroups = kGroups_, kBlocks = kBlocks_;
  static constexpr int kAcross = kTileN / kColumns;
  static constexpr int kDown = kTileM / kRows;
  static constexpr int kGroup = kAcross * kDown;
  static constexpr int kThreads = kGroup * kGroups;
  /// Between rows in shared memory: eight rows' vectors of four lie in different banks.
  static constexpr int kPitch = kStep + 4;
  /// Sums of a step are added to those before where registers allow it.
  static constexpr bool kPartial = kRows * kColumns <= 16;
  /// Between rows of sums in shared memory: pairs that half a warp writes lie in different banks.
  static constexpr int kSumPitch = kTileN + (kAcross == 8 ? 16 : 0);
  static constexpr int kTerms = (kTileM + kTileN) * kPitch;
  static constexpr int kSums = kTileM * kSumPitch;
  static constexpr int kShared = kGroups * (kTerms > kSums ? kTerms : kSums);
  static_assert(kGroup % 32 == 0 && kColumns % 2 == 0);
};

/// Of what a thread brings of a step: elements of some rows, vectors of four of them, or elements
/// of one row, where those of a column are what lies together.
enum class Reading { kElements, kVectors, kColumns };

Reading reading_of(const ConstMatrix& operand, int64_t k) {
  if (operand.col_stride != 1) {
    return operand.row_stride == 1 ? Reading::kColumns : Reading::kElements;
  }
  const uintptr_t bytes = 4 * static_cast<uintptr_t>(size_of(operand.dtype));
  const bool vectors = k % 4 == 0 && operand.row_stride % 4 == 0 &&
                       reinterpret_cast<uintptr_t>(operand.data) % bytes == 0;
  return vectors ? Reading::kVectors : Reading::kElements;
}

struct Work {
  ConstMatrix x, weight;
  int64_t m, n;
  int k;
  Matrix out;
  int64_t column_tiles;
  Reading x_reading, weight_reading;
  bool pairs;  ///< out allows stores of two values at even columns
};

/// A thread's elements of a group's step of one operand, on their way to shared memory.
template <class Shape, int kTileRows, bool kPaired>
class Loader {
 public:
  __device__ Loader(const ConstMatrix& operand, Reading reading, int64_t row0, int64_t rows, int k)
      : operand_(operand), reading_(reading), end_(k) {
    const int thread = threadIdx.x % Shape::kGroup;
    const bool columns = reading == Reading::kColumns;
    const int of_row = reading == Reading::kVectors ? kStep / 4 : kStep;  // threads
    const int row = columns ? thread % kTileRows : thread / of_row;
    k_ = columns ? thread / kTileRows : thread % of_row * (kStep / of_row);
    const int rows_apart = Shape::kGroup / of_row;
    // Columns of a pair lie half the tile apart, so that both are read as rows are.
    slot_ = (kPaired ? row % 2 * (kTileRows / 2) + row / 2 : row) * Shape::kPitch + k_;
    slots_apart_ = columns ? kApart : rows_apart / (kPaired ? 2 : 1) * Shape::kPitch;
    at_ = (row0 + row) * operand.row_stride + k_ * operand.col_stride;
    apart_ = columns ? kApart * operand.col_stride : rows_apart * operand.row_stride;
    const auto left = static_cast<int>(min(rows - row0, int64_t(kTileRows))) - row;
    count_ = columns ? (left > 0 ? kCount : 0) : (left + rows_apart - 1) / rows_apart;
  }

  /// Those from k on; zeros where there is nothing.
  __device__ __forceinline__ void load(int k) {
    const int left = min(end_ - k, kStep) - k_;
    const int of_k = reading_ == Reading::kColumns ? (left + kApart - 1) / kApart
                     : left > 0                    ? kCount
                                                   : 0;
    const int count = min(count_, of_k);
    const int64_t first = at_ + int64_t(k) * operand_.col_stride;
    if (operand_.dtype == DType::kFloat32) {
      load<uint4>(static_cast<const uint32_t*>(operand_.data) + first, count);
    } else {
      load<uint2>(static_cast<const uint16_t*>(operand_.data) + first, count);
    }
  }

  __device__ __forceinline__ void store(float* to) const {
    if (operand_.dtype == DType::kFloat16) {
      store(to, [](uint32_t bits) { return __half2float(__ushort_as_half(bits)); });
    } else if (operand_.dtype == DType::kBFloat16) {
      store(to, [](uint32_t bits) { return __uint_as_float(bits << 16); });
    } else {
      store(to, [](uint32_t bits) { return __uint_as_float(bits); });
    }
  }

 private:
  static constexpr int kStep = Shape::kStep;
  static constexpr int kCount = kTileRows * kStep / Shape::kGroup;
  static constexpr int kApart = Shape::kGroup / kTileRows;  // of K, where they are one row's
  static_assert(kCount * Shape::kGroup == kTileRows * kStep && kCount % 4 == 0);
  static_assert(kApart * kTileRows == Shape::kGroup && Shape::kGroup / kStep % 2 == 0);

  const ConstMatrix& operand_;
  Reading reading_;
  int64_t at_, apart_;
  int end_, k_, slot_, slots_apart_, count_;
  uint32_t raw_[kCount];

  template <class Four, class T>
  __device__ __forceinline__ void load(const T* from, int count) {
    if (reading_ == Reading::kVectors) {
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        Four four = {};
        if (i < count) four = __ldg(reinterpret_cast<const Four*>(from));
        if constexpr (sizeof(T) == 4) {
          raw_[4 * i] = four.x, raw_[4 * i + 1] = four.y;
          raw_[4 * i + 2] = four.z, raw_[4 * i + 3] = four.w;
        } else {
          raw_[4 * i] = four.x & 0xffff, raw_[4 * i + 1] = four.x >> 16;
          raw_[4 * i + 2] = four.y & 0xffff, raw_[4 * i + 3] = four.y >> 16;
        }
        from += apart_;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        raw_[i] = i < count ? uint32_t(__ldg(from)) : 0;
        from += apart_;
      }
    }
  }

  template <class Convert>
  __device__ __forceinline__ void store(float* to, const Convert& convert) const {
    to += slot_;
    if (reading_ == Reading::kVectors) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        *reinterpret_cast<float4*>(to) = {convert(raw_[i]), convert(raw_[i + 1]),
                                          convert(raw_[i + 2]), convert(raw_[i + 3])};
        to += slots_apart_;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) to[i * slots_apart_] = convert(raw_[i]);
    }
  }
};

/// What a thread hands to the program at once: kRows rows, kRowsApart apart, of column pairs. Some
/// may not exist, so that whole warps call it.
template <class Shape>
struct Coordinates {
  static constexpr int kValues = Shape::kTileM * Shape::kTileN / Shape::kThreads;
  static constexpr int kColumnPairs = kValues >= 4 ? 2 : 1;
  static constexpr int kRows = kValues >= 32 ? 8 : kValues / (2 * kColumnPairs);
  static constexpr int kSize = 2 * kRows * kColumnPairs;
  static constexpr int kLanes = Shape::kTileN / (2 * kColumnPairs);
  static constexpr int kColumnPairStride = 2 * kLanes;
  static constexpr int kRowsApart = Shape::kThreads / kLanes;
  static constexpr bool kPlanes = false;
  static constexpr int kStagedOperands = 0;

  int64_t row0, column0;
  int rows, columns;  // from these on

  __device__ int64_t row(int r) const { return row0 + min(r * kRowsApart, rows - 1); }
  __device__ int64_t column(int j, int c) const {
    return column0 + min(j * kColumnPairStride + c, columns - 1);
  }
};

/// Values are stored in pairs where `pairs`, and of those that exist.
template <class T, class At>
__device__ __forceinline__ void store(const Matrix& out, bool pairs, const At& at,
                                      const float (&v)[At::kSize]) {
  int columns = at.columns;
  asm volatile("" : "+r"(columns));  // else all comparisons are done early, and their bits kept
  T* to = static_cast<T*>(out.data) + at.row0 * out.row_stride + at.column0;
#pragma unroll
  for (int r = 0; r < At::kRows; ++r) {
    if (r * At::kRowsApart >= at.rows) break;
#pragma unroll
    for (int j = 0; j < At::kColumnPairs; ++j) {
      const int column = j * At::kColumnPairStride;
      const float a = v[(j * At::kRows + r) * 2], b = v[(j * At::kRows + r) * 2 + 1];
      if (pairs && column + 1 < columns) {
        if constexpr (sizeof(T) == 4) {
          *reinterpret_cast<float2*>(to + column) = {a, b};
        } else {
          *reinterpret_cast<uint32_t*>(to + column) = pack_pair(a, b, out.dtype);
        }
      } else {
        if (column < columns) store_value(to, column, a, out.dtype);
        if (column + 1 < columns) store_value(to, column + 1, b, out.dtype);
      }
    }
    to += At::kRowsApart * out.row_stride;
  }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    multiply_kernel(const __grid_constant__ DeviceProgram program,
                    const __grid_constant__ Work work) {
  constexpr int kRows = Shape::kRows, kColumns = Shape::kColumns, kPitch = Shape::kPitch;
  alignas(16) __shared__ float memory[Shape::kShared];
  wait_for_previous_kernels();
  const int group = threadIdx.x / Shape::kGroup;
  const int thread = threadIdx.x % Shape::kGroup;
  const int across = thread % Shape::kAcross, down = thread / Shape::kAcross;
  const int64_t row0 = blockIdx.x / work.column_tiles * Shape::kTileM;
  const int64_t column0 = blockIdx.x % work.column_tiles * Shape::kTileN;
  float* const xs = memory + group * Shape::kTerms;
  float* const weights = xs + Shape::kTileM * kPitch;
  Loader<Shape, Shape::kTileM, false> x(work.x, work.x_reading, row0, work.m, work.k);
  Loader<Shape, Shape::kTileN, true> weight(work.weight, work.weight_reading, column0, work.n,
                                            work.k);

  float sums[kRows][kColumns] = {};
  constexpr int kAll = Shape::kStep * Shape::kGroups;
  const int first = group * Shape::kStep;
  x.load(first);
  weight.load(first);
  for (int k = 0; k < work.k; k += kAll) {
    if (k > 0) __syncthreads();
    x.store(xs);
    weight.store(weights);
    __syncthreads();
    if (k + kAll < work.k) {
      x.load(k + kAll + first);
      weight.load(k + kAll + first);
    }
    const int left = min(work.k - k - first, Shape::kStep);
    float parts[kRows][kColumns] = {};
    float (&into)[kRows][kColumns] = Shape::kPartial ? parts : sums;
#pragma unroll 1
    for (int kk = 0; kk < left; kk += 4) {
      float4 w[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int slot = c % 2 * (Shape::kTileN / 2) + c / 2 * Shape::kAcross + across;
        w[c] = *reinterpret_cast<const float4*>(weights + slot * kPitch + kk);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const auto v =
            *reinterpret_cast<const float4*>(xs + (r * Shape::kDown + down) * kPitch + kk);
        // Four products are a sum of their own: fewer roundings follow each other.
        float four[kColumns];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) four[c] = v.x * w[c].x;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) four[c] = fmaf(v.y, w[c].y, four[c]);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) four[c] = fmaf(v.z, w[c].z, four[c]);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) into[r][c] += fmaf(v.w, w[c].w, four[c]);
      }
    }
    if constexpr (Shape::kPartial) {
#pragma unroll
      for (int i = 0; i < kRows * kColumns; ++i) {
        sums[i / kColumns][i % kColumns] += parts[i / kColumns][i % kColumns];
      }
    }
  }

  // Through shared memory, so that a warp stores whole rows, and the program's code is short.
  constexpr int kSumPitch = Shape::kSumPitch;
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float* const row =
        memory + group * Shape::kSums + (r * Shape::kDown + down) * kSumPitch + 2 * across;
#pragma unroll
    for (int c = 0; c < kColumns; c += 2) {
      *reinterpret_cast<float2*>(row + c * Shape::kAcross) = {sums[r][c], sums[r][c + 1]};
    }
  }
  __syncthreads();
  using At = Coordinates<Shape>;
  const int lane = threadIdx.x % At::kLanes;
  const auto rows = static_cast<int>(min(work.m - row0, int64_t(Shape::kTileM)));
  const auto columns = static_cast<int>(min(work.n - column0, int64_t(Shape::kTileN)));
#pragma unroll 1
  for (int begin = 0; begin < rows; begin += At::kRows * At::kRowsApart) {
    const int i = begin + threadIdx.x / At::kLanes;
    float v[At::kSize];
#pragma unroll
    for (int r = 0; r < At::kRows; ++r) {
#pragma unroll
      for (int j = 0; j < At::kColumnPairs; ++j) {
        const float* from =
            memory + (i + r * At::kRowsApart) * kSumPitch + 2 * lane + j * At::kColumnPairStride;
        float2 sum = *reinterpret_cast<const float2*>(from);
#pragma unroll
        for (int g = 1; g < Shape::kGroups; ++g) {
          const auto more = *reinterpret_cast<const float2*>(from + g * Shape::kSums);
          sum.x += more.x;
          sum.y += more.y;
        }
        v[(j * At::kRows + r) * 2] = sum.x;
        v[(j * At::kRows + r) * 2 + 1] = sum.y;
      }
    }
    const At at{row0 + i, column0 + 2 * lane, rows - i, columns - 2 * lane};
    execute(program, v, at);
    if (work.out.dtype == DType::kFloat32) {
      store<float>(work.out, work.pairs, at, v);
    } else {
      store<uint16_t>(work.out, work.pairs, at, v);
    }
  }
}

/// `Shape` is that of kTiles[kTile].
template <int kTile, class Shape>
Status launch_tile(Work& work, const DeviceProgram& program, void* stream) {
  static_assert(kTiles[kTile].m == Shape::kTileM && kTiles[kTile].n == Shape::kTileN &&
                kTiles[kTile].groups == Shape::kGroups);
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  work.column_tiles = ceil_div(work.n, Shape::kTileN);
  const dim3 grid(static_cast<unsigned>(ceil_div(work.m, Shape::kTileM) * work.column_tiles));
  return launch(multiply_kernel<Shape>, grid, Shape::kThreads, 0, stream, program, work);
}

}  // namespace

int32_t index_of(const Tile& tile) noexcept {
  const auto* found = std::find_if(std::begin(kTiles), std::end(kTiles), [&](const Tile& other) {
    return tile.m == other.m && tile.n == other.n && tile.groups == other.groups;
  });
  return found == std::end(kTiles) ? -1 : static_cast<int32_t>(found - kTiles);
}

bool sums(const Tile& tile, int64_t k) noexcept {
  return k <= (tile.groups == 1 ? 128 : tile.groups == 2 ? 512 : 4096);
}

Status multiply(const ConstMatrix& x, const ConstMatrix& weight, int64_t m, int64_t n, int64_t k,
                int32_t tile, const DeviceProgram& program, const Matrix& out,
                void* stream) noexcept {
  const uintptr_t pair_bytes = 2 * static_cast<uintptr_t>(size_of(out.dtype));
  const bool pairs =
      out.row_stride % 2 == 0 && reinterpret_cast<uintptr_t>(out.data) % pair_bytes == 0;
  Work work{
      x, weight, m, n, static_cast<int>(k), out, 0, reading_of(x, k), reading_of(weight, k), pairs};
  switch (tile) {
    case 0:
      return launch_tile<0, Layout<64, 64, 4, 8, 16, 1, 3>>(work, program, stream);
    case 1:
      return launch_tile<1, Layout<32, 32, 2, 4, 16, 2, 3>>(work, program, stream);
    case 2:
      return launch_tile<2, Layout<32, 32, 4, 4, 32, 4, 2>>(work, program, stream);
    case 3:
      return launch_tile<3, Layout<64, 8, 4, 2, 32, 4, 2>>(work, program, stream);
    default:
      return launch_tile<4, Layout<8, 64, 4, 2, 32, 4, 2>>(work, program, stream);
  }
}

}  // namespace cutfuse::simt
