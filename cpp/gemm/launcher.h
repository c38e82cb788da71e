/// \file
/// What a compiled GEMM kernel is asked to do, and the handle that launches it. No CUTLASS here.
#pragma once

#include <vector_types.h>

#include <cstdint>
#include <memory>

#include "cutfuse/batch_norm.h"
#include "cutfuse/device.h"
#include "cutfuse/gemm.h"
#include "cutfuse/status.h"
#include "cutfuse/types.h"
#include "device/gathering.h"
#include "device/logsumexp.h"
#include "device/moments.h"
#include "gemm/images.h"
#include "program/device_program.h"

namespace cutfuse::gemm {

/// Operands of batch norm's affine step in an epilogue come first, so that they are always staged.
inline constexpr int kMeanOperand = 0;
inline constexpr int kVarOperand = 1;
inline constexpr int kBiasOperand = 2;

/// Batch norm of the batch within the contraction: the blocks of a column of tiles run at the same
/// time, exchange their moments and normalise what they hold. See blocks_of_whole_columns().
struct MomentExchange {
  uint32_t* arrivals = nullptr;  ///< [columns of tiles], zeros; null: no exchange
  int32_t clears = 0;            ///< of them, those that fold_columns is to clear
  uint32_t expected = 0;         ///< arrivals of a column's blocks
  /// Null: the launch is a cooperative one, which begins when the kernel before it has ended.
  /// Otherwise two words, zeros: how many blocks run, and a Gathering. Unless all of them run soon
  /// enough they store results and partials, and normalise() has to follow.
  uint32_t* gathering = nullptr;
  uint32_t blocks = 0;  ///< of the launch
  BatchNormBuffers batch_norm;
  float lowest = 0.f;  ///< of what is stored, also where a layer is turned over
  float highest = 0.f;
};

/// Run-time arguments of the epilogue, part of the kernel's parameters.
struct EpilogueArguments {
  /// split's row words of A [M] and B [N]. A null: every row has exponent a_exponent and its
  /// non-finite elements are in the planes; both null: the tensors themselves are multiplied.
  /// Of a layer that is turned over A is the weight and B is x; what is said of columns below is
  /// of features, which are A's rows.
  const int32_t* a_words = nullptr;
  const int32_t* b_words = nullptr;
  int32_t a_exponent = 0;
  ConstMatrix a;  ///< the unsplit operands, or A's first plane; read only to repair
  ConstMatrix b;
  int64_t k = 0;
  DeviceProgram program;
  /// What fold_columns() made of each column's first `affine_steps` steps: [N] scales and shifts.
  /// Null: every tile folds its own.
  const float2* folded = nullptr;
  int32_t affine_steps = 0;
  /// Operand kVarOperand of `program` is a variance: read as weight / sqrt(var + eps).
  bool normalises = false;
  ConstMatrix weight;  ///< [N] at unit column stride; null: 1
  float eps = 0.f;
  /// [N][partial_count], or [partial_count][N] where they are exchanged; null: no statistics.
  Moments* partials = nullptr;
  int64_t partial_count = 0;  ///< of kPartialRows rows each, or a turned layer's tile's
  MomentExchange exchange;
  LogSumExpPartial* row_partials = nullptr;  ///< [M][tiles of features]; not null: no other result
  Matrix out;
  int32_t out_planes = 0;  ///< not 0: out is the first of that many planes at kBoundedExponent
  bool out_pairs = false;  ///< out allows stores of two values at even columns
  /// Of images: elements between images, channels, rows and pixels of `a`, and between filters,
  /// channels, rows and taps of `b`, whose own strides are not read.
  int64_t x_strides[4] = {}, weight_strides[4] = {};
};

inline bool is_affine(Op op) { return op == Op::kAdd || op == Op::kSub || op == Op::kMul; }

/// How many leading steps are v * s + t with s and t per channel, so that an epilogue may apply
/// them and the operands' scales as one multiply-add.
int32_t count_affine_steps(const DeviceProgram& program) noexcept;

/// Writes the multiply-adds of `columns` columns, once for all tiles: in a tile the steps' loads
/// and fp64 would take 1.6 us of 128 columns and 3.2 of 256 (five operands; H200). A scale that is
/// not a number marks a column that is not plain, see fold.cuh. May clear the exchange's arrivals.
Status fold_columns(const EpilogueArguments& arguments, int64_t columns, float2* folded,
                    void* stream) noexcept;

/// Exponent of planes that hold a bounded result, |v| <= 1, whatever the row.
inline constexpr int32_t kBoundedExponent = 14;

/// Rows of one operand that another kernel is still splitting; see split/trailing.h.
struct ArrivingRows {
  uint32_t* arrived = nullptr;  ///< [tiles]: how many rows of each; null: all are there
  bool of_a = false;
  int32_t rows = 0;
  int32_t first_tile = 0;  ///< before which all rows are there
};

/// One launch: planes as split() writes them, or tensors with K contiguous.
struct GemmCall {
  const void* a_planes = nullptr;
  const void* b_planes = nullptr;
  EpilogueArguments epilogue;
  float promotion = 1.f;
  int32_t blocks = 0;  ///< 0: as many as the waves need
  /// fold_columns() was launched just before: it begins where the kernels before it have ended, so
  /// that A and B are complete and the epilogue alone need wait for it.
  bool follows_fold = false;
  /// split_trailing() was launched just before: it too begins where the kernels before it have
  /// ended, and waiting for its end would be waiting for all rows.
  ArrivingRows arriving;
};

/// Tiles along M that a launch has: whole clusters.
int64_t padded_tile_rows(const GemmProblem& problem, const GemmPolicy& policy) noexcept;

/// Blocks of a launch, each of which takes every so many-th tile: no more than the waves need.
int32_t persistent_blocks(const GemmProblem& problem, const GemmPolicy& policy,
                          const DeviceProps& device) noexcept;

/// Blocks of a launch in which every column of tiles, or of a turned layer every row, is in one
/// wave, so that its blocks may wait for each other; 0 where this would take more waves or the
/// kernel cannot.
int32_t blocks_of_whole_columns(const GemmProblem& problem, const GemmPolicy& policy,
                                const DeviceProps& device) noexcept;

/// Elements between rows of A's and B's planes or tensors: multiples of 8. Of images, A's rows are
/// taken from `images`.
struct OperandLayout {
  int64_t a_leading = 0;
  int64_t b_leading = 0;
  Images images;
};

/// A kernel bound to one problem and device. Immutable after its first launch; thread-safe.
class Launcher {
 public:
  virtual ~Launcher() = default;
  virtual Status launch(const GemmCall& call, void* stream) noexcept = 0;
  /// Blocks that the current device holds at once; 0 where this is not known. Those of a larger
  /// launch must not wait for each other.
  virtual int32_t resident_blocks() noexcept { return 0; }
};

/// One row of instances.cmake.
struct Instance {
  int32_t arch;
  DType element;
  int32_t tile_m, tile_n, cluster_m, promote_k;
  std::unique_ptr<Launcher> (*bind)(const GemmProblem&, const GemmPolicy&, const OperandLayout&,
                                    const DeviceProps&);
  Source source = Source::kMatrix;
};

/// The compiled instances, in the table's order (generated: registry.cc in the build tree).
const Instance* instances(int32_t* count) noexcept;

/// The kernel for a problem that why_not accepts, with A from `source`.
GemmPolicy select_policy(const GemmProblem& problem, Source source,
                         const DeviceProps& device) noexcept;

/// What an instance fixes of a policy.
GemmPolicy policy_of(const Instance& instance) noexcept;

/// The instance that a policy names, or null.
const Instance* find_instance(const GemmPolicy& policy) noexcept;

}  // namespace cutfuse::gemm
