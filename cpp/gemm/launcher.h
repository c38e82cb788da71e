/// \file
/// What a compiled GEMM kernel is asked to do, and the handle that launches it. No CUTLASS here.
#pragma once

#include <cstdint>
#include <memory>

#include "cutfuse/device.h"
#include "cutfuse/gemm.h"
#include "cutfuse/status.h"
#include "cutfuse/types.h"
#include "device/moments.h"
#include "program/device_program.h"

namespace cutfuse::gemm {

/// Operands of batch norm's affine step in an epilogue come first, so that they are always staged.
inline constexpr int kMeanOperand = 0;
inline constexpr int kVarOperand = 1;
inline constexpr int kBiasOperand = 2;

/// Run-time arguments of the epilogue, part of the kernel's parameters.
struct EpilogueArguments {
  const int32_t* a_words = nullptr;  ///< split's row words of A [M] and B [N], padded to even
  const int32_t* b_words = nullptr;
  ConstMatrix a;  ///< the unsplit operands, read only to repair
  ConstMatrix b;
  int64_t k = 0;
  DeviceProgram program;
  /// Operand kVarOperand of `program` is a variance: read as weight / sqrt(var + eps).
  bool normalises = false;
  const float* weight = nullptr;  ///< null: 1
  float eps = 0.f;
  Moments* partials = nullptr;  ///< [N][partial_count] or null: no statistics
  int64_t partial_count = 0;    ///< ceil(M / kPartialRows)
  Matrix out;
  bool out_pairs = false;  ///< out allows 8-byte stores at even columns
};

/// One launch: planes as split() writes them.
struct GemmCall {
  const void* a_planes = nullptr;
  const void* b_planes = nullptr;
  EpilogueArguments epilogue;
  float promotion = 1.f;
};

/// A kernel bound to one problem and device. Immutable after its first launch; thread-safe.
class Launcher {
 public:
  virtual ~Launcher() = default;
  virtual Status launch(const GemmCall& call, void* stream) noexcept = 0;
};

/// One row of instances.cmake.
struct Instance {
  int32_t tile_m, tile_n, cluster_m, promote_k;
  std::unique_ptr<Launcher> (*bind)(const GemmProblem&, const GemmPolicy&, const DeviceProps&);
};

/// The compiled instances, in the table's order (generated: registry.cc in the build tree).
const Instance* instances(int32_t* count) noexcept;

/// The instance that a policy names, or null.
const Instance* find_instance(const GemmPolicy& policy) noexcept;

}  // namespace cutfuse::gemm
