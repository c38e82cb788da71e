#pragma once

#include "core/status.h"
#include "cuda_runtime.h"

namespace cutfuse {

inline void wait_for_previous_kernels() {}

/// Runs the kernel to its end. What it does not write of shared memory is NaN.
template <class... Parameters, class... Arguments>
Status launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t, void*,
              Arguments&&... arguments) noexcept {
  std::memset(emulated::shared, 0xff, sizeof(emulated::shared));
  auto body = [&] { kernel(arguments...); };
  emulated::run(grid, block, [](void* data) { (*static_cast<decltype(body)*>(data))(); }, &body);
  return {};
}

}  // namespace cutfuse
