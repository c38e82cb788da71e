#include <algorithm>

#include "cutfuse/gemm.h"

namespace cutfuse {

int32_t select_split_k(const GemmProblem& problem, const GemmPolicy& policy,
                       const DeviceProps& device) noexcept {
  if (policy.tile_m == 0) return 1;  // without tensor cores: skinny::select_parts() shares K out
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t tiles = ceil_div(ceil_div(problem.m, policy.tile_m), policy.cluster_m) *
                        policy.cluster_m * ceil_div(problem.n, policy.tile_n);
  // A part shorter than 512 of K saves less than the second pass costs, and 16 slices are as many
  // as that pass reads at the speed of the contraction's stores.
  constexpr int64_t kPartK = 512;
  constexpr int64_t kMaxParts = 16;
  const int64_t parts =
      std::min({device.sm_count / std::max<int64_t>(tiles, 1), problem.k / kPartK, kMaxParts});
  return static_cast<int32_t>(std::max<int64_t>(parts, 1));
}

}  // namespace cutfuse
