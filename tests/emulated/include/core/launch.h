#pragma once

#include "core/status.h"
#include "cuda_runtime.h"

namespace cutfuse {

inline void wait_for_previous_kernels() {}

/// Runs the kernel to its end.
template <class... Parameters, class... Arguments>
Status launch_clusters(unsigned cluster, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                       size_t, void*, Arguments&&... arguments) noexcept {
  emulated::run(grid, block, cluster, false, [&] { kernel(arguments...); });
  return {};
}

template <class... Parameters, class... Arguments>
Status launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t bytes, void* stream,
              Arguments&&... arguments) noexcept {
  return launch_clusters(1, kernel, grid, block, bytes, stream, arguments...);
}

}  // namespace cutfuse
