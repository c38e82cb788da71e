/// \file
/// CUDA C++ for one host thread, as far as the kernels use it: each CUDA thread is a coroutine that
/// runs until it waits for others. See machine.cc.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define CUDART_VERSION 13000
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)

using std::isfinite;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct uint2 {
  uint32_t x, y;
};
struct int2 {
  int32_t x, y;
};
struct float2 {
  float x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

namespace emulated {

inline constexpr int kMostThreads = 1024;
inline constexpr int kSharedBytes = 232448;

struct Place {
  dim3 thread, block, grid;
};
extern const Place* here;  // of the running thread
extern unsigned char shared[kSharedBytes];

/// Waits for the threads of the block that have not ended, or for those of a warp's part.
void meet_block();
void meet_lanes(int lanes);
inline void meet_warp() { meet_lanes(32); }

/// Runs body() for every thread of every block, one block after the other.
void run(dim3 grid, dim3 block, void (*body)(void*), void* data);

/// `value` of lane `from` of a warp, or of a part of `lanes` of it.
template <class T>
T of_lane(T value, unsigned from, int lanes = 32) {
  static T all[kMostThreads];
  const unsigned me = here->thread.x;
  all[me] = value;
  meet_lanes(lanes);
  const T found = all[me / lanes * lanes + from];
  meet_lanes(lanes);
  return found;
}

}  // namespace emulated

#define threadIdx (emulated::here->thread)
#define blockIdx (emulated::here->block)
#define gridDim (emulated::here->grid)

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
template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned mask) {
  return emulated::of_lane(value, threadIdx.x % 32 ^ mask);
}
inline uint32_t __reduce_max_sync(unsigned mask, uint32_t value) {
  for (unsigned distance = 16; distance > 0; distance /= 2) {
    value = max(value, __shfl_xor_sync(mask, value, distance));
  }
  return value;
}
inline int __any_sync(unsigned mask, int mine) { return __reduce_max_sync(mask, mine != 0); }
inline int __all_sync(unsigned mask, int mine) { return !__any_sync(mask, !mine); }

template <class T>
T __ldg(const T* from) {
  return *from;
}
template <class To, class From>
To emulated_bits(From from) {
  To to;
  static_assert(sizeof(to) == sizeof(from));
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline uint32_t __float_as_uint(float v) { return emulated_bits<uint32_t>(v); }
inline int32_t __float_as_int(float v) { return emulated_bits<int32_t>(v); }
inline float __uint_as_float(uint32_t v) { return emulated_bits<float>(v); }
inline float __int_as_float(int32_t v) { return emulated_bits<float>(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v)); }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline float __expf(float v) { return std::exp(v); }
inline float rsqrtf(float v) { return 1.f / std::sqrt(v); }
inline void atomicMax(uint32_t* to, uint32_t value) { *to = max(*to, value); }
inline void atomicOr(uint32_t* to, uint32_t value) { *to |= value; }

enum { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <class Kernel>
int cudaFuncSetAttribute(Kernel, int, int) {
  return 0;
}
