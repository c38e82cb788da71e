#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "cutfuse/program.h"

namespace cutfuse {
namespace {

// The shortest decimal that reads back as the same float; 20 and not 2e+01.
std::string shortest(float value) {
  char text[32];
  const auto wide = static_cast<double>(value);
  if (std::fabs(wide) < 1e6 && wide == std::trunc(wide)) {
    std::snprintf(text, sizeof(text), "%.0f", wide);
    return text;
  }
  for (int digits = 1; digits <= 9; ++digits) {
    std::snprintf(text, sizeof(text), "%.*g", digits, wide);
    if (std::strtof(text, nullptr) == value) break;
  }
  return text;
}

std::string arguments(const Step& step) {
  const std::string a = shortest(step.constants[0]);
  switch (step.op) {
    case Op::kAdd:
    case Op::kSub:
    case Op::kMul:
    case Op::kDiv:
      if (step.operand >= 0) return "(operand " + std::to_string(step.operand) + ")";
      return "(" + a + ")";
    case Op::kMinimum:
    case Op::kMaximum:
    case Op::kLeakyRelu:
      return "(" + a + ")";
    case Op::kClamp:
    case Op::kSoftplus:
      return "(" + a + ", " + shortest(step.constants[1]) + ")";
    default:
      return "";
  }
}

}  // namespace

const char* to_string(Op op) noexcept {
  switch (op) {
    case Op::kAdd:
      return "add";
    case Op::kSub:
      return "sub";
    case Op::kMul:
      return "mul";
    case Op::kDiv:
      return "div";
    case Op::kMinimum:
      return "minimum";
    case Op::kMaximum:
      return "maximum";
    case Op::kRelu:
      return "relu";
    case Op::kLeakyRelu:
      return "leaky_relu";
    case Op::kSigmoid:
      return "sigmoid";
    case Op::kTanh:
      return "tanh";
    case Op::kGeluErf:
      return "gelu_erf";
    case Op::kGeluTanh:
      return "gelu_tanh";
    case Op::kSilu:
      return "silu";
    case Op::kMish:
      return "mish";
    case Op::kHardswish:
      return "hardswish";
    case Op::kClamp:
      return "clamp";
    case Op::kSoftplus:
      return "softplus";
  }
  return "unknown";
}

std::string to_string(const Program& program) {
  if (program.count == 0) return "identity";
  std::string text;
  for (int32_t i = 0; i < program.count; ++i) {
    const Step& step = program.steps[i];
    if (i > 0) text += " | ";
    text += to_string(step.op);
    text += arguments(step);
  }
  return text;
}

}  // namespace cutfuse
