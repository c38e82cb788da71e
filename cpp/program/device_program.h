/// \file
/// A program bound to its operands, as kernels see it: part of their parameters.
#pragma once

#include "cutfuse/program.h"

namespace cutfuse {

/// Room for a program, batch norm's affine step and the program after it: one run in an epilogue.
inline constexpr int32_t kMaxDeviceSteps = 2 * kMaxSteps + 3;

struct DeviceProgram {
  int32_t count = 0;
  int32_t operand_count = 0;
  Step steps[kMaxDeviceSteps];
  Operand operands[kMaxDeviceSteps];
};

/// Appends `program`, whose operands are `operands`. kInvalidValue for an operand index beyond
/// `operand_count` or a null operand.
Status append(const Program& program, const Operand* operands, int32_t operand_count,
              DeviceProgram* bound) noexcept;

/// Whether the step is min(highest, max(lowest, v)), and these bounds.
bool bounds_of(const Step& step, float* lowest, float* highest) noexcept;

/// Steps at a program's end that a store may run on the values as they leave: from `first` on,
/// v = sigmoid(v) * factor + term, whose one rounding is that of a step: one of the two is neutral.
struct Ending {
  int32_t first = kMaxDeviceSteps;  ///< no step: there is none
  float factor = 1.f;
  float term = -0.f;
};

/// The ending of a program that ends in a sigmoid, or in one and a product with or a sum with a
/// constant.
Ending ending_of(const DeviceProgram& program) noexcept;

/// Appends one binary step that reads operand `operand`, an index into bound->operands.
void append(Op op, int32_t operand, DeviceProgram* bound) noexcept;

}  // namespace cutfuse
