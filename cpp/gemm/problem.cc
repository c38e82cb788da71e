#include <cstdio>

#include "core/checked_math.h"
#include "core/status.h"
#include "cutfuse/gemm.h"
#include "gemm/limits.h"

namespace cutfuse {
namespace {

// How the tensor cores of 8.x, 10.x and 12.x truncate was not measured yet; the promotion that
// makes up for it was tuned on 9.0, up to this K.
constexpr int64_t kMaxUnmeasuredK = 16384;

long long number(int64_t value) { return static_cast<long long>(value); }

const char* kind_of(const GemmProblem& problem) {
  switch (problem.dtype) {
    case DType::kFloat32:
      return problem.precision == Precision::kIeee ? "fp32 ieee" : "fp32 tf32";
    case DType::kFloat16:
      return "fp16";
    case DType::kBFloat16:
      return "bf16";
  }
  return "of unknown dtype";
}

}  // namespace

bool operator==(const GemmProblem& a, const GemmProblem& b) noexcept {
  return a.m == b.m && a.n == b.n && a.k == b.k && a.precision == b.precision && a.dtype == b.dtype;
}

std::string to_string(const GemmProblem& problem) {
  return std::to_string(problem.m) + "x" + std::to_string(problem.n) + "x" +
         std::to_string(problem.k) + " " + kind_of(problem);
}

Status validate(const GemmProblem& problem) noexcept {
  const auto [m, n, k, precision, dtype] = problem;
  if (m < 0 || n < 0 || k < 0) {
    return error(Code::kInvalidValue, "matrix sizes M=%lld, N=%lld, K=%lld must not be negative",
                 number(m), number(n), number(k));
  }
  if (precision != Precision::kIeee && precision != Precision::kTf32) {
    return error(Code::kInvalidValue, "unknown precision %d; this build has 0 (ieee) and 1 (tf32)",
                 static_cast<int>(precision));
  }
  if (dtype != DType::kFloat32 && dtype != DType::kFloat16 && dtype != DType::kBFloat16) {
    return error(Code::kInvalidValue,
                 "unknown dtype %d; this build has 0 (float32), 1 (float16) and 2 (bfloat16)",
                 static_cast<int>(dtype));
  }
  int64_t product = 0;
  constexpr int64_t kBytes = 8;  // the widest element of any operand: two fp16 planes count 4
  if (!checked_multiply(m, n, &product) || !checked_multiply(product, kBytes, &product) ||
      !checked_multiply(m, k, &product) || !checked_multiply(product, kBytes, &product) ||
      !checked_multiply(n, k, &product) || !checked_multiply(product, kBytes, &product)) {
    return error(Code::kInvalidShape,
                 "matrices of M=%lld, N=%lld, K=%lld need more than 2^63 bytes; split the batch",
                 number(m), number(n), number(k));
  }
  return {};
}

Status why_not(const GemmProblem& problem, const DeviceProps& device) noexcept {
  if (Status status = validate(problem); !status.ok()) return status;
  if (Status status = check_device(device); !status.ok()) return status;
  const auto [m, n, k, precision, dtype] = problem;
  // 2 K', K rounded up to whole tiles of 64, and tile indices are 32-bit.
  constexpr int64_t kLimit = (int64_t(1) << 30) - 64;
  if (m > kLimit || n > kLimit || k > kLimit) {
    return error(Code::kNotSupported,
                 "M=%lld, N=%lld, K=%lld: a kernel takes at most 2^30 - 64 along each; split the "
                 "batch or the features",
                 number(m), number(n), number(k));
  }
  // A tensor map has no dimension of 0.
  CUTFUSE_CHECK(k > 0 || m == 0 || n == 0, Code::kNotSupported,
                "M=%lld, N=%lld, K=0: sums of no products are PyTorch's", number(m), number(n));
  if (is_shallow(problem)) {
    return error(Code::kNotSupported,
                 "K=%lld: the accuracy promise was measured from K=%lld on; PyTorch runs below",
                 number(k), number(kMinK));
  }
  if (k > kMaxUnmeasuredK && plane_count(problem) == 2 && device.major != 9) {
    return error(Code::kNotSupported,
                 "K=%lld: on compute capability %d.%d the accuracy promise holds up to K=%lld; "
                 "PyTorch runs above",
                 number(k), device.major, device.minor, number(kMaxUnmeasuredK));
  }
  return {};
}

}  // namespace cutfuse
