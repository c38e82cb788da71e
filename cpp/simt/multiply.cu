#include "simt/multiply.h"

#include <algorithm>
#include <iterator>

#include "core/launch.h"
#include "device/clusters.cuh"
#include "device/copies.cuh"
#include "program/executor.cuh"
#include "simt/loader.cuh"

namespace cutfuse::simt {
namespace {

struct Work {
  ConstMatrix x, weight;
  int64_t m, n;
  int k;
  Matrix out;
  uint32_t blocks;  ///< of a tile, a cluster, which share K out by `k_of_block`
  int k_of_block;
  uint32_t column_tiles;
  Reading x_reading, weight_reading;
  bool pairs;  ///< out allows stores of two values at even columns
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

/// v = the sums of all blocks of the cluster, of which the own ones are at `own`: in their order.
template <int kSize>
__device__ __forceinline__ void add_blocks(const float* own, uint32_t blocks, float (&v)[kSize]) {
  constexpr uint32_t kMost = 8;
  float parts[kMost][kSize];
#pragma unroll
  for (uint32_t block = 0; block < kMost; ++block) {
#pragma unroll
    for (int n = 0; n < kSize; ++n) {
      parts[block][n] = block < blocks ? shared_of(own, block)[n] : 0.f;
    }
  }
#pragma unroll
  for (int n = 0; n < kSize; ++n) {
    v[n] = parts[0][n];
#pragma unroll
    for (uint32_t block = 1; block < kMost; ++block) {
      if (block < blocks) v[n] += parts[block][n];
    }
  }
}

template <class Shape, bool kClustered>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    multiply_kernel(const __grid_constant__ DeviceProgram program,
                    const __grid_constant__ Work work) {
  constexpr int kRows = Shape::kRows, kColumns = Shape::kColumns, kPitch = Shape::kPitch;
  auto* const memory = reinterpret_cast<float*>(dynamic_shared());
  wait_for_previous_kernels();
  const int group = threadIdx.x / Shape::kGroup;
  const int thread = threadIdx.x % Shape::kGroup;
  const int across = thread % Shape::kAcross, down = thread / Shape::kAcross;
  const uint32_t rank = kClustered ? cluster_rank() : 0;
  const uint32_t tile = kClustered ? blockIdx.x / work.blocks : blockIdx.x;
  const int64_t row0 = int64_t(tile / work.column_tiles) * Shape::kTileM;
  const int64_t column0 = int64_t(tile % work.column_tiles) * Shape::kTileN;
  const int begin_k = kClustered ? min(int(rank) * work.k_of_block, work.k) : 0;
  const int end_k = kClustered ? min(begin_k + work.k_of_block, work.k) : work.k;
  float* const xs = memory + group * Shape::kTerms;
  float* const weights = xs + Shape::kTileM * kPitch;
  Loader<Shape, Shape::kTileM, false> x(work.x, work.x_reading, row0, work.m, end_k);
  Loader<Shape, Shape::kTileN, true> weight(work.weight, work.weight_reading, column0, work.n,
                                            end_k);

  float sums[kRows][kColumns] = {};
  constexpr int kAll = Shape::kStep * Shape::kGroups;
  const int first = group * Shape::kStep;
  x.load(begin_k + first);
  weight.load(begin_k + first);
  for (int k = begin_k; k < end_k; k += kAll) {
    if (k > begin_k) __syncthreads();
    x.store(xs);
    weight.store(weights);
    __syncthreads();
    if (k + kAll < end_k) {
      x.load(k + kAll + first);
      weight.load(k + kAll + first);
    }
    const int left = min(end_k - k - first, Shape::kStep);
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
    if constexpr (kClustered) {
      // Every block has one turn here. A warp of one of them adds what theirs have.
      static_assert(At::kRows * At::kRowsApart >= Shape::kTileM && Shape::kThreads == 256);
      float* const own = memory + threadIdx.x * At::kSize;
      __syncthreads();  // sums lie there
#pragma unroll
      for (int n = 0; n < At::kSize; ++n) own[n] = v[n];
      sync_cluster();
      if (threadIdx.x / 32 % work.blocks != rank) break;
      add_blocks(own, work.blocks, v);
    }
    const At at{row0 + i, column0 + 2 * lane, rows - i, columns - 2 * lane};
    execute(program, v, at);
    if (work.out.dtype == DType::kFloat32) {
      store<float>(work.out, work.pairs, at, v);
    } else {
      store<uint16_t>(work.out, work.pairs, at, v);
    }
  }
  if constexpr (kClustered) sync_cluster();  // others have read this block's sums
}

/// `Shape` is that of kTiles[kTile].
template <int kTile, class Shape>
Status launch_tile(Work& work, const DeviceProgram& program, void* stream) {
  constexpr size_t kBytes = Shape::kShared * sizeof(float);
  static_assert(kBytes <= 48 << 10);
  static_assert(kTiles[kTile].m == Shape::kTileM && kTiles[kTile].n == Shape::kTileN &&
                kTiles[kTile].groups == Shape::kGroups);
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  work.column_tiles = static_cast<uint32_t>(ceil_div(work.n, Shape::kTileN));
  const auto grid = static_cast<unsigned>(ceil_div(work.m, Shape::kTileM) * work.column_tiles);
  if constexpr (Shape::kGroups == kClusteredGroups) {
    if (work.blocks > 1) {
      constexpr int kAll = Shape::kStep * Shape::kGroups;
      work.k_of_block = static_cast<int>(ceil_div(work.k, int64_t(kAll) * work.blocks)) * kAll;
      return launch_clusters(work.blocks, multiply_kernel<Shape, true>, grid * work.blocks,
                             Shape::kThreads, kBytes, stream, program, work);
    }
  }
  return launch(multiply_kernel<Shape, false>, grid, Shape::kThreads, kBytes, stream, program,
                work);
}

}  // namespace

int32_t index_of(const Tile& tile) noexcept {
  const auto* found = std::find_if(std::begin(kTiles), std::end(kTiles), [&](const Tile& other) {
    return tile.m == other.m && tile.n == other.n && tile.groups == other.groups;
  });
  return found == std::end(kTiles) ? -1 : static_cast<int32_t>(found - kTiles);
}

bool sums(const Tile& tile, int32_t blocks, int64_t k) noexcept {
  // Of 4096 products of a block 32 are added one after the other, then those of blocks.
  if (blocks > 1) return tile.groups == kClusteredGroups && k <= int64_t(blocks) * 3072;
  return k <= (tile.groups == 1 ? 128 : tile.groups == 2 ? 512 : 4096);
}

Status multiply(const ConstMatrix& x, const ConstMatrix& weight, int64_t m, int64_t n, int64_t k,
                int32_t tile, int32_t blocks, const DeviceProgram& program, const Matrix& out,
                void* stream) noexcept {
  const uintptr_t pair_bytes = 2 * static_cast<uintptr_t>(size_of(out.dtype));
  const bool pairs =
      out.row_stride % 2 == 0 && reinterpret_cast<uintptr_t>(out.data) % pair_bytes == 0;
  Work work{x,
            weight,
            m,
            n,
            static_cast<int>(k),
            out,
            static_cast<uint32_t>(blocks),
            0,
            0,
            reading_of(x, k),
            reading_of(weight, k),
            pairs};
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
