/// \file
/// Version of the library and of its binary interface.
#pragma once

#include <cstdint>

#include "cutfuse/export.h"

namespace cutfuse {

/// Raised by one whenever a type or a function of include/cutfuse changes its layout or meaning.
inline constexpr int32_t kAbiVersion = 7;

/// The kAbiVersion that the loaded library was built with. A binding compares it with its own.
CUTFUSE_API int32_t abi_version() noexcept;

/// Release of the library, for example "0.1.0".
CUTFUSE_API const char* version() noexcept;

/// What the library was built from, one line: nvcc and CUTLASS versions and architectures,
/// for example "nvcc 13.0, CUTLASS 4.2.0, sm_90a".
CUTFUSE_API const char* build_info() noexcept;

}  // namespace cutfuse
