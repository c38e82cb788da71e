#include <cuda_runtime_api.h>

#include "core/status.h"

namespace cutfuse {
namespace {

const char* remedy(cudaError_t result) {
  switch (result) {
    case cudaErrorInsufficientDriver:
      return "update the NVIDIA driver";
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
      return "build pycutfuse for this GPU's architecture";
    case cudaErrorMemoryAllocation:
      return "free device memory";
    default:
      return "rerun with CUDA_LAUNCH_BLOCKING=1 to see whether an earlier kernel caused it";
  }
}

}  // namespace

Status cuda_error(int result, const char* call) noexcept {
  const auto code = static_cast<cudaError_t>(result);
  (void)cudaGetLastError();
  return error(Code::kCuda, "%s returned %s (%s); %s", call, cudaGetErrorName(code),
               cudaGetErrorString(code), remedy(code));
}

}  // namespace cutfuse
