/// \file
/// Launches that overlap their start with the end of the kernel before them in the stream.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

#include "core/status.h"

namespace cutfuse {

#ifdef __CUDACC__
/// In every kernel launched by launch(), before it reads what others may write, or writes: waits
/// until the kernels before it in the stream have ended and their writes are visible, then lets the
/// next one start its own wait early. Before compute capability 9.0 kernels never overlap.
__device__ __forceinline__ void wait_for_previous_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
#endif

/// Whether kernels may overlap on the current device. A device that they may on must run code for
/// compute_90 or later, which waits: no unit embeds PTX for less (cmake/architectures.cmake).
inline bool current_device_overlaps() noexcept {
  int device = 0;
  int major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major >= 9;
}

/// Launches `kernel` in clusters of `cluster` blocks along x, of more than one on compute
/// capability 9.0 and later, as a programmatic dependent of the stream's last kernel: its blocks
/// may be resident before that one ends, so the kernel calls wait_for_previous_kernels().
template <class... Parameters, class... Arguments>
Status launch_clusters(unsigned cluster, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                       size_t shared_bytes, void* stream, Arguments&&... arguments) noexcept {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : current_device_overlaps() ? 1 : 0;
  CUTFUSE_CUDA(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
  return {};
}

/// As launch_clusters(), of single blocks.
template <class... Parameters, class... Arguments>
Status launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
              void* stream, Arguments&&... arguments) noexcept {
  return launch_clusters(1, kernel, grid, block, shared_bytes, stream,
                         std::forward<Arguments>(arguments)...);
}

}  // namespace cutfuse
