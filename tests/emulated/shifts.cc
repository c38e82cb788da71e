#include "conv/shift/sm90/kernel.cuh"
#include "registry.h"

namespace cutfuse::emulated_kernels {

std::vector<conv::shift::Instance> shifts() {
  using conv::shift::Role;
  using conv::shift::sm90::make_instance;
  using Half = cutlass::half_t;
  return {
      make_instance<128, 1, Half, Role::kStore>(), make_instance<128, 1, Half, Role::kStatistics>(),
      make_instance<128, 1, Half, Role::kLast>(),  make_instance<128, 1, Half, Role::kAny>(),
      make_instance<128, 2, Half, Role::kStore>(), make_instance<128, 2, Half, Role::kStatistics>(),
      make_instance<128, 2, Half, Role::kLast>(),  make_instance<128, 2, Half, Role::kAny>(),
      make_instance<256, 2, Half, Role::kStore>(), make_instance<256, 2, Half, Role::kStatistics>(),
      make_instance<256, 2, Half, Role::kLast>(),  make_instance<256, 2, Half, Role::kAny>()};
}

}  // namespace cutfuse::emulated_kernels
