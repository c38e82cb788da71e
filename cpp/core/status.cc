#include "core/status.h"

#include <cstdarg>
#include <cstdio>

namespace cutfuse {

const char* to_string(Code code) noexcept {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kInvalidValue:
      return "invalid value";
    case Code::kInvalidShape:
      return "invalid shape";
    case Code::kInvalidType:
      return "invalid type";
    case Code::kNotSupported:
      return "not supported";
    case Code::kOutOfMemory:
      return "out of memory";
    case Code::kCuda:
      return "CUDA error";
    case Code::kInternal:
      return "internal error";
  }
  return "unknown code";
}

Status error(Code code, const char* format, ...) noexcept {
  Status status;
  status.code = code;
  std::va_list arguments;
  va_start(arguments, format);
  const int length = std::vsnprintf(status.message, Status::kMessageBytes, format, arguments);
  va_end(arguments);
  if (length < 0) status.message[0] = '\0';
  return status;
}

}  // namespace cutfuse
