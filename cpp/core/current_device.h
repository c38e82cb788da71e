/// \file
/// Scope in which another CUDA device is current.
#pragma once

#include <cuda_runtime_api.h>

#include "core/status.h"

namespace cutfuse {

class CurrentDevice {
 public:
  CurrentDevice() = default;
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() {
    if (previous_ >= 0) {
      (void)cudaSetDevice(previous_);
    }
  }

  /// Makes `index` current until the end of the scope; free if it already is.
  Status enter(int index) noexcept {
    int current = -1;
    CUTFUSE_CUDA(cudaGetDevice(&current));
    if (current != index) {
      CUTFUSE_CUDA(cudaSetDevice(index));
      previous_ = current;
    }
    return {};
  }

 private:
  int previous_ = -1;
};

}  // namespace cutfuse
