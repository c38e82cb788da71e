#include <cmath>

#include "cutfuse/program.h"
#include "program/step_math.h"

// Each derivative is written as torch's backward kernel has it, so that the values at kinks, at
// infinities and for NaN are torch's too.
namespace cutfuse {
namespace {

constexpr float kSqrtHalf = 0.70710678118654752f;
constexpr float kInverseSqrtTwoPi = 0.39894228040143268f;
constexpr float kSqrtTwoOverPi = 0.79788456080286536f;
constexpr float kCubic = 0.044715f;

float gelu_erf_grad(float v) {
  const float cdf = 0.5f * (1.f + erff(v * kSqrtHalf));
  const float pdf = expf(-0.5f * v * v) * kInverseSqrtTwoPi;
  return cdf + v * pdf;
}

float gelu_tanh_grad(float v) {
  const float inner = tanhf(kSqrtTwoOverPi * (v + kCubic * (v * v * v)));
  const float inner_grad = kSqrtTwoOverPi * (1.f + 3.f * kCubic * v * v);
  return 0.5f * (1.f + inner) + 0.5f * v * (1.f - inner * inner) * inner_grad;
}

float silu_grad(float v) {
  const float s = sigmoid(v);
  return s * (1.f + v * (1.f - s));
}

float mish_grad(float v) {
  const float t = tanhf(softplus(v, 1.f, 20.f));
  return t + v * sigmoid(v) * (1.f - t * t);
}

float hardswish_grad(float v) {
  if (v <= -3.f) return 0.f;
  return v < 3.f ? v / 3.f + 0.5f : 1.f;
}

float softplus_grad(float v, float beta, float threshold) {
  const float t = beta * v;
  if (t > threshold) return 1.f;
  const float e = expf(-std::fabs(t));
  return t < 0.f ? e / (1.f + e) : 1.f / (1.f + e);
}

// Gradient of a unary step's input; at the bounds of clamp, minimum and maximum it is passed on, as
// torch.clamp did up to 2.13.
float unary_grad(const Step& step, float v, float grad) {
  const float a = step.constants[0];
  const float b = step.constants[1];
  switch (step.op) {
    case Op::kMinimum:
      return v <= a ? grad : 0.f;
    case Op::kMaximum:
      return v >= a ? grad : 0.f;
    case Op::kClamp:
      return v >= a && v <= b ? grad : 0.f;
    case Op::kRelu:
      return v <= 0.f ? 0.f : grad;
    case Op::kLeakyRelu:
      return v > 0.f ? grad : a * grad;
    case Op::kSigmoid: {
      const float y = sigmoid(v);
      return grad * (1.f - y) * y;
    }
    case Op::kTanh: {
      const float y = tanhf(v);
      return grad * (1.f - y * y);
    }
    case Op::kGeluErf:
      return grad * gelu_erf_grad(v);
    case Op::kGeluTanh:
      return grad * gelu_tanh_grad(v);
    case Op::kSilu:
      return grad * silu_grad(v);
    case Op::kMish:
      return grad * mish_grad(v);
    case Op::kHardswish:
      return grad * hardswish_grad(v);
    case Op::kSoftplus:
      return grad * softplus_grad(v, a, b);
    default:
      return grad;
  }
}

// Gradient of a binary step's input; *operand_grad is that of its operand o.
float binary_grad(Op op, float v, float o, float grad, float* operand_grad) {
  switch (op) {
    case Op::kSub:
      *operand_grad = -grad;
      return grad;
    case Op::kMul:
      *operand_grad = grad * v;
      return grad * o;
    case Op::kDiv:
      *operand_grad = -grad * (v / o / o);
      return grad / o;
    default:
      *operand_grad = grad;
      return grad;
  }
}

}  // namespace

float vjp(const Program& program, float value, const float* operands, float grad,
          float* operand_grads) noexcept {
  float inputs[kMaxSteps];
  for (int32_t i = 0; i < program.count; ++i) {
    const Step& step = program.steps[i];
    inputs[i] = value;
    const float a = step.operand < 0 ? step.constants[0] : operands[step.operand];
    visit(step.op,
          [&](auto tag) { value = evaluate<decltype(tag)::value>(value, a, step.constants[1]); });
  }
  for (int32_t i = program.count - 1; i >= 0; --i) {
    const Step& step = program.steps[i];
    if (!is_binary(step.op)) {
      grad = unary_grad(step, inputs[i], grad);
      continue;
    }
    const float o = step.operand < 0 ? step.constants[0] : operands[step.operand];
    float operand_grad = 0.f;
    grad = binary_grad(step.op, inputs[i], o, grad, &operand_grad);
    if (step.operand >= 0 && operand_grads != nullptr) operand_grads[step.operand] += operand_grad;
  }
  return grad;
}

}  // namespace cutfuse
