/// \file
/// Undoing the scales of split() on a thread's accumulators.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cutfuse/split.h"
#include "program/executor.cuh"
#include "program/fold.cuh"

namespace cutfuse::gemm {

/// Calls body(j) for each column pair; apart where registers are scarce: else the words of many
/// pairs are read ahead and spilled.
template <class Coordinates, class Body>
__device__ __forceinline__ void for_each_pair(const Body& body) {
  constexpr int kPairs = Coordinates::kColumnPairs;
  constexpr int kPairsAtOnce = kPairs < 8 ? kPairs : kPairs % 8 == 0 ? 8 : 6;
  static_assert(kPairs % kPairsAtOnce == 0);
  executor::for_each_chunk<(Coordinates::kSize > 96), kPairs / kPairsAtOnce>([&](int chunk) {
#pragma unroll
    for (int j = 0; j < kPairsAtOnce; ++j) body(chunk * kPairsAtOnce + j);
  });
}

/// Whether a row word is of a finite row over which steps may be folded.
__device__ __forceinline__ bool is_plain(int32_t word) {
  return !row_has_nonfinite(word) && folds_exactly(row_exponent(word));
}

/// v *= 2^-(row exponent + column exponent), with the columns' words in slot 0. Returns whether a
/// row or a column of the warp's tile has non-finite inputs.
template <class Coordinates>
__device__ __forceinline__ bool unscale(float (&v)[Coordinates::kSize],
                                        const int (&row_words)[Coordinates::kRows],
                                        const Coordinates& at) {
  constexpr int kRows = Coordinates::kRows;
  int row_exponents[kRows];
  bool nonfinite = false;
  bool plain = true;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    row_exponents[r] = row_exponent(row_words[r]);
    nonfinite |= row_has_nonfinite(row_words[r]);
    plain &= abs(row_exponents[r]) <= kPlainExponent;
  }
  for_each_pair<Coordinates>([&](int j) {
    const int2 words = at.read_slot(0, j);
    nonfinite |= row_has_nonfinite(words.x) || row_has_nonfinite(words.y);
    plain &= abs(row_exponent(words.x)) <= kPlainExponent &&
             abs(row_exponent(words.y)) <= kPlainExponent;
  });
  if (__all_sync(0xffffffffu, plain)) {
    for_each_pair<Coordinates>([&](int j) {
      const int2 words = at.read_slot(0, j);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float* pair = &v[(j * kRows + r) * 2];
        pair[0] *= power_of_two(-row_exponents[r] - row_exponent(words.x));
        pair[1] *= power_of_two(-row_exponents[r] - row_exponent(words.y));
      }
    });
  } else {
    for_each_pair<Coordinates>([&](int j) {
      const int2 words = at.read_slot(0, j);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float* pair = &v[(j * kRows + r) * 2];
        scale_exactly(pair[0], row_exponents[r] + row_exponent(words.x));
        scale_exactly(pair[1], row_exponents[r] + row_exponent(words.y));
      }
    });
  }
  return __any_sync(0xffffffffu, nonfinite);
}

/// v = v * row scale * column scale + column shift, with the columns' in slots `slot` and
/// `slot + 1`; every word is plain.
template <class Coordinates>
__device__ __forceinline__ void apply_folded(float (&v)[Coordinates::kSize],
                                             const int (&row_words)[Coordinates::kRows],
                                             const Coordinates& at, int slot) {
  constexpr int kRows = Coordinates::kRows;
  float rows[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) rows[r] = power_of_two(-row_exponent(row_words[r]));
  for_each_pair<Coordinates>([&](int j) {
    const int2 scale = at.read_slot(slot, j);
    const int2 shift = at.read_slot(slot + 1, j);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float* pair = &v[(j * kRows + r) * 2];
      pair[0] = fmaf(pair[0] * rows[r], __int_as_float(scale.x), __int_as_float(shift.x));
      pair[1] = fmaf(pair[1] * rows[r], __int_as_float(scale.y), __int_as_float(shift.y));
    }
  });
}

}  // namespace cutfuse::gemm
