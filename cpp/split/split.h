/// \file
/// Splitting both operands of a contraction in one launch, before it begins; see trailing.h for
/// rows that can wait.
#pragma once

#include <cstdint>

#include "cutfuse/status.h"
#include "cutfuse/types.h"

namespace cutfuse {

/// One matrix of `rows` rows and where its planes and row words go.
struct SplitJob {
  ConstMatrix x;
  int64_t rows = 0;
  void* planes = nullptr;
  int32_t* words = nullptr;
  int64_t first_rows = INT64_MAX;  ///< how many of them split() takes
};

/// Counters of a later kernel that a launch sets to zero beside its own work: a launch for them
/// alone took the host about 3 us.
struct Counters {
  uint32_t* data = nullptr;
  int32_t count = 0;
};

/// Splits `first` and, unless it is null, `second`, both with k columns, into `count` planes on the
/// current device: in one launch where one kernel suits both. Clears `counters`.
Status split(const SplitJob& first, const SplitJob* second, int64_t k, int32_t count,
             const Counters& counters, void* stream) noexcept;

}  // namespace cutfuse
