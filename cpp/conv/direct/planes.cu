/// \file
/// Lanes are rows of four results side by side in a plane; small planes share a block.
#include "conv/direct/window.cuh"

namespace cutfuse::conv::direct {

Status run_planes(const Params& params, void* stream) noexcept {
  return run_windows<false>(params, stream);
}

}  // namespace cutfuse::conv::direct
