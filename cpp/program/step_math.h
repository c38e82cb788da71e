/// \file
/// The fp32 function of each Op, shared by the host's run() and the kernels' executor.
#pragma once

#include <cuda_runtime_api.h>  // __host__ and __device__, which are nothing to a C++ compiler

#include <cmath>

#include "cutfuse/program.h"

namespace cutfuse {

// Products and sums of steps are not contracted to an FMA across steps, so that a kernel with the
// steps fixed at compile time gives the executor's bits.
__host__ __device__ inline float rounded_add(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

__host__ __device__ inline float rounded_multiply(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

/// IEEE 754-2019 minimum: NaN if either is NaN, and -0 < +0. One instruction in a kernel.
__host__ __device__ inline float minimum(float a, float b) {
#ifdef __CUDA_ARCH__
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  if (a != a || b != b) return a + b;
  return a < b || (a == b && std::signbit(a)) ? a : b;
#endif
}

/// IEEE 754-2019 maximum: NaN if either is NaN, and -0 < +0.
__host__ __device__ inline float maximum(float a, float b) {
#ifdef __CUDA_ARCH__
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  if (a != a || b != b) return a + b;
  return a > b || (a == b && std::signbit(b)) ? a : b;
#endif
}

// exp(x) for x in [-88, 88] to 3 ulp, 0 below -87.3, NaN for NaN: 2^t with t = x log2(e), and what
// rounding t lost put back. No branch, one special function.
#ifdef __CUDA_ARCH__
__device__ inline float bounded_exp(float x) {
  constexpr float kLog2E = 1.44269504f;
  constexpr float kLn2 = 0.693147181f;
  const float t = x * kLog2E;
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(t));
  return fmaf(power, fmaf(t, -kLn2, x), power);
}

// 1 / d for d in [1, 2^127], to 1 ulp, 0 where that is below 2^-126: IEEE division would branch for
// ranges that cannot occur.
__device__ inline float reciprocal_from_one(float d) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
  return r;
}
#endif

// 1 / (1 + exp(-v)), of which v outside of [-88, 88] changes nothing.
__host__ __device__ inline float sigmoid(float v) {
#ifdef __CUDA_ARCH__
  return reciprocal_from_one(1.f + bounded_exp(-minimum(maximum(v, -88.f), 88.f)));
#else
  const float e = std::exp(-std::fabs(v));
  const float r = 1.f / (1.f + e);
  return v < 0.f ? e * r : r;
#endif
}

__host__ __device__ inline float silu(float v) { return v * sigmoid(v); }

__host__ __device__ inline float gelu_erf(float v) {
  constexpr float kSqrtHalf = 0.70710678118654752f;
  return 0.5f * v * (1.f + erff(v * kSqrtHalf));
}

__host__ __device__ inline float gelu_tanh(float v) {
  constexpr float kSqrtTwoOverPi = 0.79788456080286536f;
  constexpr float kCubic = 0.044715f;
  return 0.5f * v * (1.f + tanhf(kSqrtTwoOverPi * (v + kCubic * (v * v * v))));
}

// With e = exp(v): tanh(log(1 + e)) = ((1 + e)^2 - 1) / ((1 + e)^2 + 1) = n / (n + 2), n = e (e +
// 2), one exp and one division instead of three functions. From v = 20 on the ratio rounds to 1,
// and the bound keeps n finite.
__host__ __device__ inline float mish(float v) {
  const float e = expf(fminf(v, 20.f));
  const float n = e * (e + 2.f);
  return v * (n / (n + 2.f));
}

__host__ __device__ inline float hardswish(float v) {
  return v * minimum(maximum(v + 3.f, 0.f), 6.f) / 6.f;
}

// log(1 + exp(t)) = max(t, 0) + log(1 + exp(-|t|)), which does not overflow for thresholds over 88.
__host__ __device__ inline float softplus(float v, float beta, float threshold) {
  const float t = beta * v;
  return t > threshold ? v : (fmaxf(t, 0.f) + log1pf(expf(-fabsf(t)))) / beta;
}

/// True if the Op takes an operand.
constexpr bool is_binary(Op op) {
  return op == Op::kAdd || op == Op::kSub || op == Op::kMul || op == Op::kDiv;
}

/// f(v) of one Op: a is the operand's value or constants[0], b is constants[1].
template <Op kOp>
__host__ __device__ inline float evaluate(float v, [[maybe_unused]] float a,
                                          [[maybe_unused]] float b) {
  static_assert(static_cast<int32_t>(kOp) >= 0 && static_cast<int32_t>(kOp) < kOpCount);
  if constexpr (kOp == Op::kAdd) {
    return rounded_add(v, a);
  } else if constexpr (kOp == Op::kSub) {
    return rounded_add(v, -a);
  } else if constexpr (kOp == Op::kMul) {
    return rounded_multiply(v, a);
  } else if constexpr (kOp == Op::kDiv) {
    return v / a;
  } else if constexpr (kOp == Op::kMinimum) {
    return minimum(v, a);
  } else if constexpr (kOp == Op::kMaximum) {
    return maximum(v, a);
  } else if constexpr (kOp == Op::kRelu) {
    return maximum(v, 0.f);
  } else if constexpr (kOp == Op::kLeakyRelu) {
    return v > 0.f ? v : rounded_multiply(a, v);
  } else if constexpr (kOp == Op::kSigmoid) {
    return sigmoid(v);
  } else if constexpr (kOp == Op::kTanh) {
    return tanhf(v);
  } else if constexpr (kOp == Op::kGeluErf) {
    return gelu_erf(v);
  } else if constexpr (kOp == Op::kGeluTanh) {
    return gelu_tanh(v);
  } else if constexpr (kOp == Op::kSilu) {
    return silu(v);
  } else if constexpr (kOp == Op::kMish) {
    return mish(v);
  } else if constexpr (kOp == Op::kHardswish) {
    return hardswish(v);
  } else if constexpr (kOp == Op::kClamp) {
    return minimum(maximum(v, a), b);
  } else {
    return softplus(v, a, b);
  }
}

template <Op kOp>
struct OpTag {
  static constexpr Op value = kOp;
};

/// Calls visitor(OpTag<op>{}); an op that is not in the enumeration calls nothing.
template <class Visitor>
__host__ __device__ __forceinline__ void visit(Op op, const Visitor& visitor) {
  switch (op) {
    case Op::kAdd:
      return visitor(OpTag<Op::kAdd>{});
    case Op::kSub:
      return visitor(OpTag<Op::kSub>{});
    case Op::kMul:
      return visitor(OpTag<Op::kMul>{});
    case Op::kDiv:
      return visitor(OpTag<Op::kDiv>{});
    case Op::kMinimum:
      return visitor(OpTag<Op::kMinimum>{});
    case Op::kMaximum:
      return visitor(OpTag<Op::kMaximum>{});
    case Op::kRelu:
      return visitor(OpTag<Op::kRelu>{});
    case Op::kLeakyRelu:
      return visitor(OpTag<Op::kLeakyRelu>{});
    case Op::kSigmoid:
      return visitor(OpTag<Op::kSigmoid>{});
    case Op::kTanh:
      return visitor(OpTag<Op::kTanh>{});
    case Op::kGeluErf:
      return visitor(OpTag<Op::kGeluErf>{});
    case Op::kGeluTanh:
      return visitor(OpTag<Op::kGeluTanh>{});
    case Op::kSilu:
      return visitor(OpTag<Op::kSilu>{});
    case Op::kMish:
      return visitor(OpTag<Op::kMish>{});
    case Op::kHardswish:
      return visitor(OpTag<Op::kHardswish>{});
    case Op::kClamp:
      return visitor(OpTag<Op::kClamp>{});
    case Op::kSoftplus:
      return visitor(OpTag<Op::kSoftplus>{});
  }
}

}  // namespace cutfuse
