/// \file
/// Policy -> compiled instance.
#include <algorithm>

#include "gemm/launcher.h"

namespace cutfuse::gemm {

const Instance* find_instance(const GemmPolicy& policy) noexcept {
  int32_t count = 0;
  const Instance* all = instances(&count);
  const Instance* found = std::find_if(all, all + count, [&](const Instance& instance) {
    return instance.tile_m == policy.tile_m && instance.tile_n == policy.tile_n &&
           instance.cluster_m == policy.cluster_m && instance.promote_k == policy.promote_k;
  });
  return found == all + count ? nullptr : found;
}

}  // namespace cutfuse::gemm
