#pragma once

#include <numeric>

#include "cuda_runtime.h"

namespace cub {

/// CUB's result is that of the first of kThreads lanes; here all of them have it.
template <class T, int kThreads = 32>
class WarpReduce {
 public:
  struct TempStorage {};
  explicit WarpReduce(TempStorage&) {}
  template <class Merge>
  T Reduce(T mine, const Merge& merge) {
    const auto merged = [&](const T* all) {
      return std::accumulate(all + 1, all + kThreads, *all, merge);
    };
    return emulated::of_lanes(mine, merged, kThreads);
  }
};

template <class T, int kThreads>
class BlockReduce {
 public:
  struct TempStorage {};
  explicit BlockReduce(TempStorage&) {}
  template <class Merge>
  T Reduce(T mine, const Merge& merge) {
    static T all[emulated::kMostThreads];
    all[threadIdx.x] = mine;
    __syncthreads();
    T merged = all[0];
    for (int i = 1; i < kThreads; ++i) merged = merge(merged, all[i]);
    __syncthreads();
    return merged;
  }
};

}  // namespace cub
