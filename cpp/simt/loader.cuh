/// \file
/// How a block shares out a tile of sums, and how operands come to shared memory.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cutfuse/types.h"

namespace cutfuse::simt {

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

inline Reading reading_of(const ConstMatrix& operand, int64_t k) {
  if (operand.col_stride != 1) {
    return operand.row_stride == 1 ? Reading::kColumns : Reading::kElements;
  }
  const uintptr_t bytes = 4 * static_cast<uintptr_t>(size_of(operand.dtype));
  const bool vectors = k % 4 == 0 && operand.row_stride % 4 == 0 &&
                       reinterpret_cast<uintptr_t>(operand.data) % bytes == 0;
  return vectors ? Reading::kVectors : Reading::kElements;
}

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

}  // namespace cutfuse::simt
