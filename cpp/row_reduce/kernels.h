/// \file
/// The passes of a logsumexp.
#pragma once

#include <cstdint>

#include "cutfuse/row_reduce.h"
#include "cutfuse/status.h"
#include "cutfuse/types.h"

namespace cutfuse::row_reduce {

inline constexpr int kBlock = 256;

/// Values that a thread of either kernel takes at a time.
inline constexpr int kRowBatch = 16;
inline constexpr int kColumnBatch = 8;

/// Parameters of both kernels. Index and lengths count vectors where the kernel reads vectors.
struct Work {
  const void* x;
  void* out;
  LogSumExpPartial* partials;  ///< [rows of out][splits], or null: one part a row, out is written
  StridedIndex kept;
  StridedIndex kept_out;
  StridedIndex reduced;
  int64_t rows;
  int64_t length;
  int64_t split_length;
  int32_t width;
  DType out_dtype;
};

Status reduce_rows(const LogSumExpPlan& plan, const void* x, void* out, LogSumExpPartial* partials,
                   void* stream) noexcept;
Status reduce_columns(const LogSumExpPlan& plan, const void* x, void* out,
                      LogSumExpPartial* partials, void* stream) noexcept;
/// merge_logsumexp_partials on the current device, arguments checked.
Status merge(const LogSumExpPartial* partials, int64_t rows, int64_t count, void* out,
             DType out_dtype, void* stream) noexcept;

/// Blocks of a grid that takes `per_block` items each and comes back for what is left.
inline unsigned grid_blocks(int64_t items, int64_t per_block) {
  const int64_t blocks = items / per_block + (items % per_block != 0 ? 1 : 0);
  return static_cast<unsigned>(blocks < INT32_MAX ? blocks : INT32_MAX);
}

}  // namespace cutfuse::row_reduce
