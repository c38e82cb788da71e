/// \file
/// Result of every call that can fail. No exception crosses the library's boundary.
#pragma once

#include <cstdint>

#include "cutfuse/export.h"

namespace cutfuse {

/// What went wrong; a binding maps each code to one exception type (the Python type in brackets).
enum class Code : int32_t {
  kOk = 0,
  kInvalidValue,  ///< a value is out of its range [ValueError]
  kInvalidShape,  ///< shapes or layouts do not fit together [RuntimeError, as torch]
  kInvalidType,   ///< a dtype or kind that the argument cannot have [TypeError]
  kNotSupported,  ///< valid, but no kernel of this build takes it [NotImplementedError]
  kOutOfMemory,   ///< host memory ran out [MemoryError]
  kCuda,          ///< a CUDA call failed [RuntimeError]
  kInternal,      ///< a defect of this library [RuntimeError]
};

/// A code and a text that names the offending value, the limit and the remedy. Trivially copyable.
struct [[nodiscard]] Status {
  static constexpr int kMessageBytes = 512;

  Code code = Code::kOk;
  char message[kMessageBytes] = {};  ///< null-terminated; empty when ok

  bool ok() const noexcept { return code == Code::kOk; }
};

/// "ok", "invalid value", ...: the name of a code in words.
CUTFUSE_API const char* to_string(Code code) noexcept;

}  // namespace cutfuse
