#pragma once

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
    T merged = emulated::of_lane(mine, 0, kThreads);
    for (unsigned lane = 1; lane < kThreads; ++lane) {
      merged = merge(merged, emulated::of_lane(mine, lane, kThreads));
    }
    return merged;
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
