#pragma once

#include "cuda_runtime.h"

struct __half {
  _Float16 value;

  __half() = default;
  __half(float v) : value(static_cast<_Float16>(v)) {}
  operator float() const { return static_cast<float>(value); }
};
struct __half2 {
  __half x, y;
};
inline __half2 __floats2half2_rn(float a, float b) { return {a, b}; }
inline float __half2float(__half v) { return v; }
inline float2 __half22float2(__half2 v) { return {v.x, v.y}; }
inline __half __ushort_as_half(unsigned short bits) { return emulated_bits<__half>(bits); }
