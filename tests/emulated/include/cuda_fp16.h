#pragma once

#include "cuda_runtime.h"

struct __half {
  _Float16 value;
};
struct __half2 {
  __half x, y;
};
inline __half2 __floats2half2_rn(float a, float b) {
  return {{static_cast<_Float16>(a)}, {static_cast<_Float16>(b)}};
}
inline float __half2float(__half v) { return static_cast<float>(v.value); }
inline float2 __half22float2(__half2 v) { return {__half2float(v.x), __half2float(v.y)}; }
inline __half __ushort_as_half(unsigned short bits) { return emulated_bits<__half>(bits); }
