#include "core/driver.h"

#include <cuda_runtime_api.h>

#include "core/status.h"

namespace cutfuse {
namespace {

using ReplaceAddress = CUresult (*)(CUtensorMap*, void*);

ReplaceAddress resolve_replace_address() noexcept {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t result = cudaGetDriverEntryPointByVersion(
      "cuTensorMapReplaceAddress", &entry, 12000, cudaEnableDefault, &found);
  return result == cudaSuccess && found == cudaDriverEntryPointSuccess
             ? reinterpret_cast<ReplaceAddress>(entry)
             : nullptr;
}

}  // namespace

Status replace_tensor_map_address(CUtensorMap* map, const void* address) noexcept {
  static const ReplaceAddress replace = resolve_replace_address();
  if (replace == nullptr) {
    return error(Code::kCuda,
                 "the CUDA driver has no cuTensorMapReplaceAddress; a driver for CUDA 13.0 or "
                 "newer (580 or later) is needed");
  }
  const CUresult result = replace(map, const_cast<void*>(address));
  if (result != CUDA_SUCCESS) {
    return error(Code::kCuda, "cuTensorMapReplaceAddress refused address %p (driver error %d)",
                 address, static_cast<int>(result));
  }
  return {};
}

}  // namespace cutfuse
