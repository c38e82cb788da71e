/// \file
/// A fused operator: contraction -> program -> tail -> program, planned once and run many times.
#pragma once

#include <cstdint>
#include <string>

#include "cutfuse/batch_norm.h"
#include "cutfuse/device.h"
#include "cutfuse/export.h"
#include "cutfuse/gemm.h"
#include "cutfuse/program.h"
#include "cutfuse/status.h"
#include "cutfuse/types.h"

namespace cutfuse {

enum class Tail : int32_t {
  kNone = 0,
  kBatchNormTrain = 1,  ///< statistics of the batch; M >= 2
  kBatchNormEval = 2,   ///< running statistics, folded into the epilogue at every call
  kLogSumExp = 3,       ///< over the N features; the result is [M], no program may follow
};

/// out = after(tail(program(x * weight^T))), x [M, K], weight [N, K], out [M, N] or [M], all of the
/// dtype that `gemm` names.
struct FusedProblem {
  GemmProblem gemm;
  Program program;
  Tail tail = Tail::kNone;
  Program after;               ///< must be empty without a tail (append to `program` instead)
  bool weight_planes = false;  ///< the caller brings planes of the weight (frozen module)
  /// Elements between rows of x and weight, multiples of 8: fp16 and bf16 only, which also must
  /// have K contiguous and start at a multiple of 16 bytes. 0 for fp32, which takes any strides.
  int64_t x_leading = 0;
  int64_t weight_leading = 0;
};

/// Pointers of one call, all on the plan's device unless said otherwise.
struct FusedBuffers {
  ConstMatrix x;                        ///< [M, K], any strides, any alignment
  ConstMatrix weight;                   ///< [N, K], any strides; read also when planes are given
  const void* weight_planes = nullptr;  ///< as split() writes them, if problem.weight_planes
  const int32_t* weight_words = nullptr;
  const Operand* operands = nullptr;  ///< host array, operands of `program`
  int32_t operand_count = 0;
  const Operand* after_operands = nullptr;  ///< host array, operands of `after`
  int32_t after_operand_count = 0;
  Matrix out;  ///< [M, N], row-major, or [M]; overlaps no input
  BatchNormBuffers batch_norm;
  void* workspace = nullptr;  ///< Plan::workspace_bytes, 256-byte aligned
  /// 1 + u: promotions put back 5/3 u on average of what truncation took; 1 in integer-exact tests.
  float promotion = 1.f + 0x1p-23f;
};

/// An immutable plan for one problem on one device; may be run from several threads at once.
class CUTFUSE_API Plan {
 public:
  virtual ~Plan() = default;
  virtual const FusedProblem& problem() const noexcept = 0;
  virtual const GemmPolicy& policy() const noexcept = 0;
  virtual const DeviceProps& device() const noexcept = 0;
  /// Bytes of scratch memory that run() needs; it need not be initialised and holds nothing after.
  virtual int64_t workspace_bytes() const noexcept = 0;
  /// Stages, one line each, for `explain`.
  virtual std::string describe() const = 0;
};

/// kInvalidValue / kInvalidShape / kNotSupported if the problem is invalid or no kernel takes it:
/// the one predicate behind `explain`, `info` and the operators.
CUTFUSE_API Status why_not(const FusedProblem& problem, const DeviceProps& device) noexcept;

/// kNotSupported, in words for `explain`, if PyTorch's own kernels are expected to be faster: a
/// pure function of sizes, from times measured on an H200. Ok where why_not() is not.
CUTFUSE_API Status why_slower(const FusedProblem& problem, const DeviceProps& device) noexcept;

/// Plans `problem` for `device`; `forced`, if given, replaces select_policy's choice and must be a
/// compiled policy. The caller owns *plan and frees it with destroy_plan. Needs no GPU; the first
/// run() on a machine prepares the kernel there.
CUTFUSE_API Status make_plan(const FusedProblem& problem, const DeviceProps& device,
                             const GemmPolicy* forced, Plan** plan) noexcept;
CUTFUSE_API void destroy_plan(Plan* plan) noexcept;

/// Two contractions in one plan, out = second(first(x)): between them lies what the second one
/// multiplies, planes or 16-bit tensor, in the workspace. first.tail is kNone; at fp32 its program
/// must end in a step with |v| <= 1 (sigmoid, tanh). second.gemm.k is first.gemm.n.
struct ChainProblem {
  FusedProblem first;
  FusedProblem second;
};

/// Of the second one x, of the first one out, and both workspaces are not read.
struct ChainBuffers {
  FusedBuffers first;
  FusedBuffers second;
  void* workspace = nullptr;  ///< ChainPlan::workspace_bytes, 256-byte aligned
};

class CUTFUSE_API ChainPlan {
 public:
  virtual ~ChainPlan() = default;
  virtual int64_t workspace_bytes() const noexcept = 0;
  virtual std::string describe() const = 0;
};

/// As of one contraction.
CUTFUSE_API Status why_not(const ChainProblem& problem, const DeviceProps& device) noexcept;
CUTFUSE_API Status make_chain(const ChainProblem& problem, const DeviceProps& device,
                              ChainPlan** plan) noexcept;
CUTFUSE_API void destroy_chain(ChainPlan* plan) noexcept;
CUTFUSE_API Status run(const ChainPlan& plan, const ChainBuffers& buffers, void* stream) noexcept;

/// Launches the plan's stages on `stream` (a cudaStream_t) of the plan's device, which is made
/// current for the duration of the call if it is not. Returns after the launches; never
/// synchronises or allocates; safe under graph capture. Deterministic: the same inputs give the
/// same bits.
CUTFUSE_API Status run(const Plan& plan, const FusedBuffers& buffers, void* stream) noexcept;

}  // namespace cutfuse
