#pragma once

#include "core/launch.h"

namespace cutfuse {

template <class... Parameters, class... Arguments>
Status launch_clusters(unsigned cluster, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                       size_t, void*, Arguments&&... arguments) noexcept {
  emulated::run(grid, block, cluster, false, [&] { kernel(arguments...); });
  return {};
}

}  // namespace cutfuse
