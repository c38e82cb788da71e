/// \file
/// Lanes are channels, which lie side by side.
#include "conv/direct/window.cuh"

namespace cutfuse::conv::direct {

Status run_pixels(const Params& params, void* stream) noexcept {
  return run_windows<true>(params, stream);
}

}  // namespace cutfuse::conv::direct
