// The kernels of sm_90 that are emulated.
#pragma once

#include <vector>

#include "conv/patches/params.h"
#include "conv/shift/params.h"
#include "gemm/launcher.h"

namespace cutfuse::emulated_kernels {

std::vector<gemm::Instance> gemms_of_matrices(), gemms_of_images(), gemms_of_planes();
std::vector<conv::shift::Instance> shifts();
std::vector<conv::patches::Instance> patches();

}  // namespace cutfuse::emulated_kernels
