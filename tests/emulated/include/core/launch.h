#pragma once

#include "core/status.h"
#include "cuda_runtime.h"

namespace cutfuse {

inline void wait_for_previous_kernels() {}

/// Runs the kernel to its end.
template <class... Parameters, class... Arguments>
Status launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t, void*,
              Arguments&&... arguments) noexcept {
  emulated::run(grid, block, 1, false, [&] { kernel(arguments...); });
  return {};
}

}  // namespace cutfuse
