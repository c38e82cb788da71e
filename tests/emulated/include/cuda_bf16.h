#pragma once

#include "cuda_runtime.h"

struct __nv_bfloat16 {
  uint16_t bits;

  __nv_bfloat16() = default;
  /// To nearest, ties to even.
  __nv_bfloat16(float v) {
    const uint32_t wide = __float_as_uint(v);
    bits = v != v ? 0x7fff : static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
  }
  operator float() const { return __uint_as_float(uint32_t(bits) << 16); }
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {a, b}; }
