/// \file
/// Reductions of a tensor over some of its dimensions: logsumexp.
#pragma once

#include <cstdint>
#include <string>

#include "cutfuse/device.h"
#include "cutfuse/export.h"
#include "cutfuse/status.h"
#include "cutfuse/types.h"

namespace cutfuse {

/// out[kept] = log(sum over reduced of exp(x[kept, reduced])), exactly as torch.logsumexp: -inf for
/// an empty sum or all -inf, +inf if one element is +inf and none NaN, NaN if one is NaN. Computed
/// in fp32 relative to the maximum, so no finite input overflows.
///
/// Element (i_0, i_1, ..) of x is x[sum of i_d * strides[d]]; strides may be 0 or negative. `out`
/// has the kept dimensions in their order, contiguous, and does not overlap x.
struct LogSumExpProblem {
  int32_t dim_count = 0;           ///< 0 .. 64
  const int64_t* sizes = nullptr;  ///< [dim_count]
  const int64_t* strides = nullptr;
  uint64_t reduced = 0;  ///< bit d: dimension d is reduced
  DType dtype = DType::kFloat32;
  DType out_dtype = DType::kFloat32;
};

/// Dimensions walked by one flat index, the last the fastest.
struct StridedIndex {
  static constexpr int32_t kMaxDims = 8;

  int32_t count = 1;  ///< at least 1
  int64_t sizes[kMaxDims] = {1};
  int64_t strides[kMaxDims] = {0};
};

enum class RowReading : int32_t {
  kRows = 0,     ///< neighbouring threads read along the reduced dimensions
  kColumns = 1,  ///< neighbouring threads read along the kept dimensions
};

/// How a problem is run; plain values, made by plan_logsumexp.
struct LogSumExpPlan {
  StridedIndex kept;      ///< dimensions that lie together in x and in out are merged
  StridedIndex kept_out;  ///< the same dimensions with their strides in out
  StridedIndex reduced;
  int64_t rows = 0;    ///< elements of out
  int64_t length = 0;  ///< elements of x for each of them
  DType dtype = DType::kFloat32;
  DType out_dtype = DType::kFloat32;
  RowReading reading = RowReading::kRows;
  int32_t width = 0;     ///< kRows: threads of a row; kColumns: rows of a block
  bool vectors = false;  ///< kRows: x may be read 16 bytes at a time, if aligned to that
  int32_t splits = 1;    ///< parts of a row; more than 1: partials in the workspace, then a merge
  int64_t split_length = 0;  ///< elements of a part
  int64_t workspace_bytes = 0;
  int32_t device = 0;
};

/// "rows of 8 threads, vectors, 4 splits": for explain.
CUTFUSE_API std::string to_string(const LogSumExpPlan& plan);

/// Plans a problem: a pure function, no GPU needed. kInvalidValue for sizes that are negative or
/// whose product overflows 63 bits; kNotSupported if more than StridedIndex::kMaxDims kept or
/// reduced dimensions are left after merging, or the build has no kernel for the device.
CUTFUSE_API Status plan_logsumexp(const LogSumExpProblem& problem, const DeviceProps& device,
                                  LogSumExpPlan* plan) noexcept;

/// Runs a plan on `stream` of its device. `x` and `out` are aligned to their elements, `workspace`
/// (plan.workspace_bytes, null if 0) to 8 bytes. Reads x once. Deterministic for one device model;
/// no host synchronisation; safe in CUDA graphs.
CUTFUSE_API Status logsumexp(const LogSumExpPlan& plan, const void* x, void* out, void* workspace,
                             void* stream) noexcept;

/// Two floats, (max, sum), aligned to 8 bytes, that stand for the values v of a part of a row:
///   max = largest v, -inf if there is none;  sum = sum of exp(v - shift),
///   shift = max, or 0 if max is infinite.
/// So (-inf, 0) is the empty part and one of -inf only; +inf gives (+inf, +inf). A NaN among the
/// values makes sum or max NaN. `max` need not be attained: any finite shift serves with which sum
/// neither overflows nor vanishes. In device/logsumexp.h.
struct LogSumExpPartial;

/// out[r] = logsumexp of the values that partials[r][0 .. count-1] stand for; -inf if count is 0.
/// `partials` [rows][count] and `out` [rows] are contiguous. On `stream` of `device`;
/// deterministic; no host synchronisation; safe in CUDA graphs. kInvalidValue for negative sizes.
CUTFUSE_API Status merge_logsumexp_partials(const LogSumExpPartial* partials, int64_t rows,
                                            int64_t count, void* out, DType out_dtype,
                                            const DeviceProps& device, void* stream) noexcept;

}  // namespace cutfuse
