/// \file
/// Launches of clusters of blocks: compute capability 9.0 and later.
#pragma once

#include "core/launch.h"

namespace cutfuse {

/// As launch(), in clusters of `cluster` blocks along x.
template <class... Parameters, class... Arguments>
Status launch_clusters(unsigned cluster, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                       size_t shared_bytes, void* stream, Arguments&&... arguments) noexcept {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = 2;
  CUTFUSE_CUDA(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
  return {};
}

}  // namespace cutfuse
