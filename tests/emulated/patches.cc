#include "conv/patches/sm90/kernel.cuh"
#include "registry.h"

namespace cutfuse::emulated_kernels {

std::vector<conv::patches::Instance> patches() {
  using conv::patches::sm90::make_instance;
  return {make_instance<64, 1>(), make_instance<64, 2>()};
}

}  // namespace cutfuse::emulated_kernels
