/// \file
/// What a policy needs to know of a GPU. A test makes one by hand; no GPU is needed for that.
#pragma once

#include <cstdint>

#include "cutfuse/export.h"
#include "cutfuse/status.h"

namespace cutfuse {

struct DeviceProps {
  int32_t index = 0;  ///< CUDA ordinal
  int32_t major = 0;  ///< compute capability
  int32_t minor = 0;
  int32_t sm_count = 0;
  int64_t shared_bytes = 0;  ///< opt-in shared memory of one block, bytes
  int64_t l2_bytes = 0;
  int32_t driver_version = 0;  ///< as cuDriverGetVersion, for example 13000
  char name[64] = {};
};

inline bool operator==(const DeviceProps& a, const DeviceProps& b) {
  return a.index == b.index && a.major == b.major && a.minor == b.minor &&
         a.sm_count == b.sm_count && a.shared_bytes == b.shared_bytes && a.l2_bytes == b.l2_bytes &&
         a.driver_version == b.driver_version;
}

/// Number of CUDA devices; 0 without a driver or a GPU (never an error). Creates no context.
CUTFUSE_API int32_t device_count() noexcept;

/// Fills `props` for CUDA device `index` without creating a context.
/// kInvalidValue if there is no such device, kCuda if the driver is missing or too old for this
/// build (the text names both versions).
CUTFUSE_API Status query_device(int32_t index, DeviceProps* props) noexcept;

/// kNotSupported, with the architectures that this build has, if no kernel of it can run on
/// `props`; kInvalidValue if it has no multiprocessor.
CUTFUSE_API Status check_device(const DeviceProps& props) noexcept;

}  // namespace cutfuse
