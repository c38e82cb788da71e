/// \file
/// CUDA C++ for one host thread, as far as the kernels use it: each CUDA thread is a coroutine that
/// runs until it waits for others. See machine.cc.
#pragma once

// Before CUDA's own headers, which define what is not defined.
#define __host__
#define __device__
#define __global__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __noinline__

#include_next <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

using std::isfinite;
using std::isnan;

#include "machine.h"
#include "ptx.h"

namespace emulated {

/// visit(values) with those of a warp's lanes, or of a part of `lanes` of it, by lane.
template <class T, class Visit>
auto of_lanes(T value, const Visit& visit, int lanes = 32) {
  // Two, as some read while others bring the next ones.
  static T all[2][16 * kMostThreads];
  T* const mine = all[turn_of_lanes(lanes)] + here->number - here->thread.x % lanes;
  mine[here->thread.x % lanes] = value;
  meet_lanes(lanes);
  return visit(static_cast<const T*>(mine));
}

/// `value` of lane `from`.
template <class T>
T of_lane(T value, unsigned from, int lanes = 32) {
  return of_lanes(value, [&](const T* all) { return all[from]; }, lanes);
}

}  // namespace emulated

#define CUTFUSE_EMULATED_PAIR(type)                         \
  inline type min(type a, type b) { return a < b ? a : b; } \
  inline type max(type a, type b) { return a > b ? a : b; }
CUTFUSE_EMULATED_PAIR(int)
CUTFUSE_EMULATED_PAIR(unsigned)
CUTFUSE_EMULATED_PAIR(long)
CUTFUSE_EMULATED_PAIR(float)
inline long min(int a, long b) { return a < b ? a : b; }
inline long min(long a, int b) { return a < b ? a : b; }

inline void __syncthreads() { emulated::meet_block(); }
inline int __syncthreads_or(int mine) {
  static int any;
  __syncthreads();
  any = 0;
  __syncthreads();
  any |= mine != 0;
  __syncthreads();
  return any;
}
inline int __syncthreads_and(int mine) { return !__syncthreads_or(!mine); }
inline unsigned __activemask() { return ~0u; }
inline void __syncwarp() { emulated::meet_warp(); }
template <class T>
T __shfl_sync(unsigned, T value, unsigned lane, unsigned width = 32) {
  return emulated::of_lane(value, threadIdx.x % 32 / width * width + lane % width);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned mask) {
  return emulated::of_lane(value, threadIdx.x % 32 ^ mask);
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t value) {
  return emulated::of_lanes(value,
                            [](const uint32_t* all) { return *std::max_element(all, all + 32); });
}
inline unsigned __ballot_sync(unsigned, int mine) {
  return emulated::of_lanes(mine != 0, [](const bool* all) {
    unsigned votes = 0;
    for (unsigned lane = 0; lane < 32; ++lane) votes |= unsigned(all[lane]) << lane;
    return votes;
  });
}
inline int __any_sync(unsigned mask, int mine) { return __ballot_sync(mask, mine) != 0; }
inline int __all_sync(unsigned mask, int mine) { return __ballot_sync(mask, !mine) == 0; }

template <class T>
T __ldg(const T* from) {
  return *from;
}
template <class T>
T __ldcg(const T* from) {
  return *from;
}
template <class T>
T __ldcs(const T* from) {
  return *from;
}
template <class To, class From>
To emulated_bits(From from) {
  To to;
  static_assert(sizeof(to) == sizeof(from));
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline size_t __cvta_generic_to_shared(const void* pointer) {
  return static_cast<const unsigned char*>(pointer) - emulated::here->shared;
}
inline uint32_t __float_as_uint(float v) { return emulated_bits<uint32_t>(v); }
inline int32_t __float_as_int(float v) { return emulated_bits<int32_t>(v); }
inline float __uint_as_float(uint32_t v) { return emulated_bits<float>(v); }
inline float __int_as_float(int32_t v) { return emulated_bits<float>(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t(a) * b >> 32; }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v)); }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline float __expf(float v) { return std::exp(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float v) { return 1.f / std::sqrt(v); }
/// Who looks again and again has waited.
inline long long clock64() {
  static long long time = 0;
  return time += 1000;
}
inline void atomicMax(uint32_t* to, uint32_t value) { *to = max(*to, value); }
inline void atomicOr(uint32_t* to, uint32_t value) { *to |= value; }

/// Runs the kernel to its end.
template <class... Parameters, class... Arguments>
cudaError_t emulated_launch(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                            Arguments&&... arguments) {
  unsigned cluster = 1;
  bool all = false;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) cluster = attribute.val.clusterDim.x;
    if (attribute.id == cudaLaunchAttributeCooperative) all = attribute.val.cooperative != 0;
  }
  emulated::run(config->gridDim, config->blockDim, cluster, all, [&] { kernel(arguments...); });
  return cudaSuccess;
}
#define cudaLaunchKernelEx emulated_launch
#define cudaFuncSetAttribute(...) cudaSuccess
