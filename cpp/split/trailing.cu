#include "split/trailing.h"

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cuda/atomic>

#include "core/launch.h"
#include "core/status.h"
#include "device/barriers.cuh"
#include "device/copies.cuh"
#include "split/convert.cuh"
#include "split/planes.h"

namespace cutfuse {
namespace {

using planes::Magnitude;

// Few SMs do what is a pass of all otherwise. An SM reads at most 120 GB/s and writes 62 (H100),
// the former by plain loads of neighbours alone: asynchronous copies reach 69, and 31 where a
// thread's are 32 bytes apart.
constexpr int kPiece = 4;   // elements
constexpr int kPieces = 8;  // of a row, that a thread has at most
constexpr int kBlock = 1024;

/// `kThreads` threads that have a row of their own, and meet by themselves: while some wait for one
/// another, others load, convert and store.
template <int kThreads, int kPlanes>
class Team {
 public:
  __device__ explicit Team(const planes::Work& work)
      : work_(work),
        thread_(int(threadIdx.x) % kThreads),
        pieces_((int(work.source.k / kPiece) - thread_ + kThreads - 1) / kThreads) {}

  __device__ bool leads() const { return thread_ == 0; }
  __device__ void meet() const { sync_threads(threadIdx.x / kThreads, kThreads); }

  __device__ void load(int32_t row) {
    const float4* from = row_of(row);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      x_[i][0] = x_[i][1] = x_[i][2] = x_[i][3] = 0.f;
      if (i < pieces_) load(from, i);
    }
  }

  /// Of the row that was loaded. The team meets once, so two tables are filled in turn.
  __device__ Magnitude magnitude(int turn) const {
    constexpr uint32_t kNonfinite = 1u << 31;
    const Magnitude mine = planes::magnitude_of(x_);
    const uint32_t bits = __reduce_max_sync(0xffffffffu, mine.bits);
    const bool nonfinite = __any_sync(0xffffffffu, mine.nonfinite);
    uint32_t* table = reinterpret_cast<uint32_t*>(dynamic_shared()) +
                      (threadIdx.x / kThreads * 2 + turn % 2) * kWarps;
    if (thread_ % 32 == 0) table[thread_ / 32] = bits | (nonfinite ? kNonfinite : 0);
    meet();
    Magnitude all;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const uint32_t word = table[warp];
      all.bits = max(all.bits, word & ~kNonfinite);
      all.nonfinite |= (word & kNonfinite) != 0;
    }
    return all;
  }

  /// The row that was loaded, and loads `next` in its place.
  __device__ void convert(int32_t row, const Magnitude& magnitude, int32_t next) {
    const int exponent = planes::scale_exponent(magnitude.bits);
    if (leads()) work_.planes.words[row] = planes::word_of(exponent, magnitude.nonfinite);
    if (!magnitude.nonfinite && exponent <= 127) {
      convert<true>(row, exponent, next);
    } else {
      convert<false>(row, exponent, next);
    }
  }

 private:
  static constexpr int kWarps = kThreads / 32;

  const planes::Work& work_;
  int thread_;
  int pieces_;  // that the row has for this thread
  float x_[kPieces][kPiece];

  __device__ const float4* row_of(int32_t row) const {
    const ConstMatrix& x = work_.source.x;
    return reinterpret_cast<const float4*>(static_cast<const float*>(x.data) +
                                           int64_t(row) * x.row_stride) +
           thread_;
  }

  __device__ void load(const float4* row, int i) {
    const float4 four = __ldcs(row + i * kThreads);
    x_[i][0] = four.x, x_[i][1] = four.y, x_[i][2] = four.z, x_[i][3] = four.w;
  }

  template <bool kPlain>
  __device__ void convert(int32_t row, int exponent, int32_t next) {
    const planes::Planes& planes = work_.planes;
    const int64_t at = int64_t(row) * planes.leading;
    auto* to_hi = reinterpret_cast<uint2*>(planes.hi + at) + thread_;
    auto* to_lo = reinterpret_cast<uint2*>(planes.lo + at) + thread_;
    const float4* from = row_of(next);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (i >= pieces_) break;
      uint2 hi, lo;
      planes::convert<kPlain>(x_[i], exponent, hi, lo);
      to_hi[i * kThreads] = hi;
      if constexpr (kPlanes == 2) to_lo[i * kThreads] = lo;
      load(from, i);
    }
  }
};

/// A team splits bundles of rows, those of all teams in turn.
template <int kThreads, int kPlanes>
__global__ void __launch_bounds__(kBlock, 1)
    split_trailing_rows(const __grid_constant__ planes::Work work, const TrailingRows trailing) {
  constexpr int kTeams = kBlock / kThreads;
  Team<kThreads, kPlanes> team(work);
  const auto rows = static_cast<int32_t>(work.source.rows);
  const int32_t stride = int(gridDim.x) * kTeams * kTrailingBundle;
  const auto count = [&](int32_t bundle) {  // whose rows have been stored, of which the team knows
    if (!team.leads()) return;
    cuda::atomic_ref<uint32_t, cuda::thread_scope_device> arrived(
        trailing.arrived[bundle / trailing.tile_rows]);
    arrived.fetch_add(static_cast<uint32_t>(min(rows - bundle, kTrailingBundle)),
                      cuda::memory_order_release);
  };
  wait_for_previous_kernels();
  int32_t bundle = trailing.first_row +
                   (int(blockIdx.x) * kTeams + int(threadIdx.x) / kThreads) * kTrailingBundle;
  if (bundle >= rows) return;
  team.load(bundle);
  int turn = 0;
#pragma unroll 1
  for (int32_t row = bundle; row < rows;) {
    const Magnitude magnitude = team.magnitude(++turn);
    if (row >= bundle + stride) {
      count(bundle);
      bundle += stride;
    }
    const bool last = row + 1 == bundle + kTrailingBundle;
    const int32_t next = last ? bundle + stride : row + 1;
    team.convert(row, magnitude, next < rows ? next : row);
    row = next;
  }
  team.meet();
  count(bundle);
}

template <int kThreads, int kPlanes>
Status launch_trailing(const planes::Work& work, const TrailingRows& rows, int32_t blocks,
                       void* stream) {
  // As much shared memory as leaves no room for another block.
  constexpr int kBytes = 128 << 10;
  auto* kernel = &split_trailing_rows<kThreads, kPlanes>;
  CUTFUSE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  // SMs that are neighbours, so that clusters of the contraction fit on the others.
  return launch_clusters(2, kernel, static_cast<unsigned>(blocks), kBlock, kBytes, stream, work,
                         rows);
}

template <int kThreads>
Status launch_trailing(const planes::Work& work, const TrailingRows& rows, int32_t blocks,
                       void* stream) {
  return work.planes.lo != nullptr ? launch_trailing<kThreads, 2>(work, rows, blocks, stream)
                                   : launch_trailing<kThreads, 1>(work, rows, blocks, stream);
}

}  // namespace

bool can_trail(const ConstMatrix& x, int64_t k) noexcept {
  return planes::reads_vectors(x) && k % 8 == 0 && k <= 8192;
}

Status split_trailing(const SplitJob& job, int64_t k, int32_t count, const TrailingRows& rows,
                      int32_t blocks, void* stream) noexcept {
  const planes::Work work = planes::make_work(job, k, count);
  constexpr int64_t kElements = kPieces * kPiece;
  if (k <= 64 * kElements) return launch_trailing<64>(work, rows, blocks, stream);
  if (k <= 128 * kElements) return launch_trailing<128>(work, rows, blocks, stream);
  return launch_trailing<256>(work, rows, blocks, stream);
}

}  // namespace cutfuse
