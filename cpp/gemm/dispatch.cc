/// \file
/// Policy -> compiled instance, and what a program allows its epilogue.
#include <algorithm>

#include "gemm/launcher.h"

namespace cutfuse::gemm {

const Instance* find_instance(const GemmPolicy& policy) noexcept {
  int32_t count = 0;
  const Instance* all = instances(&count);
  const Instance* found = std::find_if(all, all + count, [&](const Instance& instance) {
    return instance.arch == policy.arch && instance.element == policy.element &&
           instance.tile_m == policy.tile_m && instance.tile_n == policy.tile_n &&
           instance.cluster_m == policy.cluster_m && instance.promote_k == policy.promote_k &&
           instance.source == policy.source;
  });
  return found == all + count ? nullptr : found;
}

int32_t count_affine_steps(const DeviceProgram& program) noexcept {
  int32_t count = 0;
  for (; count < program.count; ++count) {
    const Step& step = program.steps[count];
    if (!is_affine(step.op) ||
        (step.operand >= 0 && program.operands[step.operand].row_stride != 0)) {
      break;
    }
  }
  return count;
}

}  // namespace cutfuse::gemm
