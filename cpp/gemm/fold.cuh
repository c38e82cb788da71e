/// \file
/// The operands' scales and the program's affine steps as one multiply-add a value.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cutfuse/split.h"
#include "gemm/launcher.h"

namespace cutfuse::gemm {

/// While no exponent is beyond +-60 the scale 2^-(a + b) of a value is itself an fp32 number.
inline constexpr int kPlainExponent = 60;

/// 2^e for e in [-126, 127].
__device__ __forceinline__ float power_of_two(int e) { return __int_as_float((127 + e) << 23); }

/// Whether a row word is of a finite row with an exponent in the plain range.
__device__ __forceinline__ bool is_plain(int32_t word) {
  return !row_has_nonfinite(word) && abs(row_exponent(word)) <= kPlainExponent;
}

/// A column's v * scale + shift. In fp64, so that folding costs no accuracy against the steps one
/// by one. Not plain: a scale or shift so large or small that a step could overflow or vanish on
/// its way where PyTorch's does not, or the other way; then the steps run one by one.
struct FoldedColumn {
  float scale;
  float shift;
  bool plain;
};

/// operand(i) is the column's value of operand i.
template <class Read>
__device__ FoldedColumn fold(const DeviceProgram& program, int steps, int32_t word,
                             const Read& operand) {
  double scale = 1.0;
  double shift = 0.0;
  bool plain = is_plain(word);
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
  const float unscale = plain ? power_of_two(-row_exponent(word)) : 1.f;
  return {static_cast<float>(scale) * unscale, static_cast<float>(shift), plain};
}

/// Waits for the `threads` threads of a barrier; whether `value` holds for all of them.
__device__ __forceinline__ bool sync_all(bool value, uint32_t barrier, uint32_t threads) {
  uint32_t all;
  asm volatile(
      "{\n"
      ".reg .pred mine, result;\n"
      "setp.ne.u32 mine, %1, 0;\n"
      "barrier.cta.red.and.pred result, %2, %3, mine;\n"
      "selp.u32 %0, 1, 0, result;\n"
      "}\n"
      : "=r"(all)
      : "r"(static_cast<uint32_t>(value)), "r"(barrier), "r"(threads)
      : "memory");
  return all != 0;
}

}  // namespace cutfuse::gemm
