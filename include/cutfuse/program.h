/// \file
/// A program: an ordered list of pointwise steps on fp32 values, run inside a kernel's epilogue.
#pragma once

#include <cstdint>
#include <string>

#include "cutfuse/export.h"
#include "cutfuse/status.h"
#include "cutfuse/types.h"

namespace cutfuse {

/// One pointwise function v -> f(v). The numbers are part of the binary interface.
enum class Op : int32_t {
  // Binary: o is the step's operand, or constants[0] when it has none.
  kAdd = 0,      ///< v + o
  kSub = 1,      ///< v - o
  kMul = 2,      ///< v * o
  kDiv = 3,      ///< v / o, IEEE rounding
  kMinimum = 4,  ///< torch.clamp(v, max=constants[0]); NaN propagates; constant only
  kMaximum = 5,  ///< torch.clamp(v, min=constants[0]); NaN propagates; constant only
  // Unary.
  kRelu = 6,        ///< max(v, 0), NaN propagates
  kLeakyRelu = 7,   ///< v > 0 ? v : constants[0] * v
  kSigmoid = 8,     ///< 1 / (1 + exp(-v))
  kTanh = 9,        ///< tanh(v)
  kGeluErf = 10,    ///< v / 2 * (1 + erf(v / sqrt 2))
  kGeluTanh = 11,   ///< v / 2 * (1 + tanh(sqrt(2 / pi) * (v + 0.044715 v^3)))
  kSilu = 12,       ///< v / (1 + exp(-v))
  kMish = 13,       ///< v * tanh(log(1 + exp(v)))
  kHardswish = 14,  ///< v * min(max(v + 3, 0), 6) / 6
  kClamp = 15,      ///< min(max(v, constants[0]), constants[1]), NaN propagates; hardtanh has
                    ///< the same values, but gradient 0 at the bounds
  kSoftplus = 16,   ///< c0 * v > c1 ? v : log(1 + exp(c0 * v)) / c0, with c0 = beta, c1 = threshold
};
inline constexpr int32_t kOpCount = 17;

inline constexpr int32_t kMaxSteps = 16;

/// One step. Unused constants are zero so that equality is meaningful.
struct Step {
  Op op = Op::kAdd;
  int32_t operand = -1;  ///< index into the operands given at run time; -1: a constant
  float constants[2] = {0.f, 0.f};
};

/// At most kMaxSteps steps, executed in order. A plain value: copy, compare, print.
struct Program {
  int32_t count = 0;
  Step steps[kMaxSteps];
};

/// A run-time operand of a step, read at (row, column) with the given strides in elements; a zero
/// stride broadcasts: (0, 0) a scalar, (0, 1) a per-channel vector, (1, 0) a per-row vector.
using Operand = ConstMatrix;

CUTFUSE_API bool operator==(const Step& a, const Step& b) noexcept;
CUTFUSE_API bool operator==(const Program& a, const Program& b) noexcept;
inline bool operator!=(const Program& a, const Program& b) noexcept { return !(a == b); }

/// "mul", "gelu_tanh", ...: torch's name of the function.
CUTFUSE_API const char* to_string(Op op) noexcept;

/// One line, for example "add(operand 0) | mul(2) | sigmoid".
CUTFUSE_API std::string to_string(const Program& program);

/// Builds a program from what crosses the dispatcher: for step i, codes[2i] is its Op and
/// codes[2i + 1] its operand index or -1; constants[2i] and constants[2i + 1] are its constants.
/// kInvalidValue for an unknown op, more than kMaxSteps steps, list lengths that do not match, an
/// operand that the op cannot have or a clamp, minimum or maximum with a NaN bound.
CUTFUSE_API Status make_program(const int64_t* codes, int64_t code_count, const double* constants,
                                int64_t constant_count, Program* program) noexcept;

/// kInvalidValue unless every step is well formed and every operand index is in
/// [0, operand_count).
CUTFUSE_API Status validate(const Program& program, int32_t operand_count) noexcept;

/// An equal program in fewer or cheaper steps, bit-identical in result on every finite and
/// non-finite input: mul by 1 and div by 1 are dropped, sub of a constant becomes add, div by a
/// power of two becomes mul.
CUTFUSE_API Program canonicalise(const Program& program) noexcept;

/// Runs `program` on the host for one value; operands[i] is the value of operand i there.
CUTFUSE_API float run(const Program& program, float value, const float* operands) noexcept;

/// Vector-Jacobian product on the host for one value: given the gradient `grad` of the program's
/// result, returns the gradient of `value` and adds to operand_grads[i] that of operand i
/// (operand_grads may be null). At kinks it is torch 2.13's: a bound passes the gradient on.
CUTFUSE_API float vjp(const Program& program, float value, const float* operands, float grad,
                      float* operand_grads) noexcept;

}  // namespace cutfuse
