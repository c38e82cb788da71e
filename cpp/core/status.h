/// \file
/// Building a Status, and the two checks that return one.
#pragma once

#include "cutfuse/status.h"

namespace cutfuse {

/// A Status with `code` and the text that `format` gives, cut to what a Status holds. The text
/// names the offending value, the limit and the remedy.
[[gnu::format(printf, 2, 3)]] Status error(Code code, const char* format, ...) noexcept;

/// kCuda with the name and the words of `result`, a cudaError_t, which `call` returned. Takes the
/// error off the runtime, so that it is not reported again by somebody else's next call.
Status cuda_error(int result, const char* call) noexcept;

}  // namespace cutfuse

/// Returns error(code, format, ...) from the enclosing function unless `condition` holds.
#define CUTFUSE_CHECK(condition, code, ...)                       \
  do {                                                            \
    if (!(condition)) return ::cutfuse::error(code, __VA_ARGS__); \
  } while (false)

/// Returns cuda_error(...) from the enclosing function unless the CUDA runtime call succeeds.
#define CUTFUSE_CUDA(call)                                                        \
  do {                                                                            \
    const int cutfuse_result = static_cast<int>(call);                            \
    if (cutfuse_result != 0) return ::cutfuse::cuda_error(cutfuse_result, #call); \
  } while (false)
