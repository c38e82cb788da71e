#include "gemm/sm90/launch.cuh"
#include "registry.h"

namespace cutfuse::emulated_kernels {

using gemm::sm90::make_instance;
using Half = cutlass::half_t;
using Bfloat = cutlass::bfloat16_t;

constexpr Source kFrom = Source::kImages;
std::vector<gemm::Instance> gemms_of_images() {
  return {make_instance<Half, 128, 128, 1, 6, 64, kFrom>(),
          make_instance<Half, 128, 128, 1, 6, 16, kFrom>(),
          make_instance<Half, 128, 256, 2, 4, 0, kFrom>(),
          make_instance<Half, 128, 128, 1, 6, 0, kFrom>(),
          make_instance<Bfloat, 128, 128, 1, 6, 0, kFrom>()};
}

}  // namespace cutfuse::emulated_kernels
