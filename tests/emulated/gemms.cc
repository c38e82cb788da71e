#include "gemm/sm90/launch.cuh"
#include "registry.h"

namespace cutfuse::emulated_kernels {

using gemm::sm90::make_instance;
using Half = cutlass::half_t;
using Bfloat = cutlass::bfloat16_t;

std::vector<gemm::Instance> gemms_of_matrices() {
  return {make_instance<Half, 128, 128, 2, 6, 64>(),
          make_instance<Half, 128, 192, 2, 5, 64>(),
          make_instance<Half, 128, 128, 1, 6, 16>(),
          make_instance<Half, 128, 256, 2, 4, 0>(),
          make_instance<Bfloat, 128, 128, 1, 6, 0>(),
          make_instance<float, 128, 256, 2, 3, 0, Source::kTurned>(),
          make_instance<Half, 128, 256, 2, 4, 0, Source::kTurned>(),
          make_instance<Bfloat, 128, 256, 2, 4, 0, Source::kTurned>()};
}

}  // namespace cutfuse::emulated_kernels
