/// \file
/// Which kernel a fused problem takes and how its tail runs.
#include <algorithm>
#include <cmath>

#include "fused/plan.h"
#include "skinny/multiply.h"

namespace cutfuse::fused {

bool is_skinny(const FusedProblem& problem) noexcept {
  const auto [m, n, k, precision, dtype] = problem.gemm;
  return problem.tail == Tail::kNone && std::min(m, n) <= skinny::kMostRows;
}

bool may_split_k(const FusedProblem& problem, Links links) noexcept {
  return problem.tail == Tail::kNone && !links.writes_planes;
}

bool has_bounds_only(const Program& program, float* lowest, float* highest) noexcept {
  const Step nothing{Op::kClamp, -1, {-INFINITY, INFINITY}};
  return program.count <= 1 &&
         bounds_of(program.count == 1 ? program.steps[0] : nothing, lowest, highest);
}

int32_t exchanging_blocks(const FusedProblem& problem, const GemmPolicy& policy,
                          const DeviceProps& device) noexcept {
  float lowest, highest;
  const bool fits =
      problem.tail == Tail::kBatchNormTrain && has_bounds_only(problem.after, &lowest, &highest);
  return fits ? gemm::blocks_of_whole_columns(problem.gemm, policy, device) : 0;
}

GemmPolicy select_policy(const FusedProblem& problem, Links links,
                         const DeviceProps& device) noexcept {
  const auto [m, n, k, precision, dtype] = problem.gemm;
  if (may_split_k(problem, links) && !links.reads_planes && is_skinny(problem)) {
    GemmPolicy policy;
    policy.arch = kSkinny;
    policy.split_k = skinny::select_parts(m, n, k, device.sm_count).parts;
    return policy;
  }
  GemmPolicy policy = cutfuse::select_policy(problem.gemm, device);
  if (may_split_k(problem, links)) policy.split_k = select_split_k(problem.gemm, policy, device);
  GemmPolicy by_columns = policy;
  by_columns.raster = Raster::kAlongM;
  by_columns.swizzle = 1;
  return exchanging_blocks(problem, by_columns, device) != 0 ? by_columns : policy;
}

}  // namespace cutfuse::fused
