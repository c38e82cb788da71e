/// \file
/// A program's leading affine steps, and powers of two that scale its input, as one multiply-add a
/// value.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "program/device_program.h"

namespace cutfuse {

/// While no exponent is beyond +-60 the scale 2^-(a + b) of a value is itself an fp32 number.
inline constexpr int kPlainExponent = 60;

/// Of what steps may be folded over: values of inputs below 2^25, whose sums are below 2^80, so
/// that no step on the way overflows, which PyTorch's would.
__device__ __forceinline__ bool folds_exactly(int exponent) {
  return exponent >= -10 && exponent <= kPlainExponent;
}

/// 2^e for e in [-126, 127].
__device__ __forceinline__ float power_of_two(int e) { return __int_as_float((127 + e) << 23); }

/// v *= 2^-e in two exact steps; beyond +-252 the result is 0 or infinite either way.
__device__ __forceinline__ void scale_exactly(float& v, int e) {
  const int clamped = min(max(-e, -252), 252);
  const int first = clamped / 2;
  v = v * power_of_two(first) * power_of_two(clamped - first);
}

/// A column's v * scale + shift. In fp64, so that folding costs no accuracy against the steps one
/// by one. Not plain: a scale or shift so large or small that a step could overflow or vanish on
/// its way where PyTorch's does not, or the other way; then the steps run one by one.
struct FoldedColumn {
  float scale;
  float shift;
  bool plain;
};

/// The first `steps` steps, which are all affine, of v * 2^-exponent; operand(i) is the column's
/// value of operand i.
template <class Read>
__device__ FoldedColumn fold(const DeviceProgram& program, int steps, int32_t exponent,
                             const Read& operand) {
  double scale = 1.0;
  double shift = 0.0;
  bool plain = folds_exactly(exponent);
  for (int i = 0; i < steps; ++i) {
    const Step& step = program.steps[i];
    const double o = step.operand < 0 ? step.constants[0] : operand(step.operand);
    if (step.op == Op::kMul) {
      scale *= o;
      shift *= o;
    } else {
      shift += step.op == Op::kAdd ? o : -o;
    }
    plain &= (scale == 0.0 || (fabs(scale) >= 0x1p-30 && fabs(scale) <= 0x1p30)) &&
             fabs(shift) <= 0x1p90;
  }
  const float unscale = plain ? power_of_two(-exponent) : 1.f;
  return {static_cast<float>(scale) * unscale, static_cast<float>(shift), plain};
}

}  // namespace cutfuse
