#pragma once

#include "cuda_runtime.h"

struct __nv_bfloat162 {
  uint16_t x, y;
};
/// To nearest, ties to even.
inline uint16_t emulated_bfloat16(float v) {
  const uint32_t bits = __float_as_uint(v);
  if (v != v) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  return {emulated_bfloat16(a), emulated_bfloat16(b)};
}
