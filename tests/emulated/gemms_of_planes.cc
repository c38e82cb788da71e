#include "gemm/sm90/launch.cuh"
#include "registry.h"

namespace cutfuse::emulated_kernels {

using gemm::sm90::make_instance;
using Half = cutlass::half_t;

std::vector<gemm::Instance> gemms_of_planes() {
  return {make_instance<float, 128, 64, 1, 8, 0, Source::kNchw>(),
          make_instance<Half, 128, 64, 1, 8, 64, Source::kNchw>(),
          make_instance<Half, 128, 64, 1, 8, 16, Source::kNchw>()};
}

}  // namespace cutfuse::emulated_kernels
