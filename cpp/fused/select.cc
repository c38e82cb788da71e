/// \file
/// Which kernel a fused problem takes and how its tail runs.
#include <algorithm>
#include <cmath>

#include "core/status.h"
#include "fused/plan.h"
#include "skinny/multiply.h"

namespace cutfuse::fused {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

Source source_of(const Links& links) {
  if (!links.reads_images) return Source::kMatrix;
  return links.images.planes_in ? Source::kNchw : Source::kImages;
}

/// Whether the scheduler pads grouped tiles so that those without columns would write partials of
/// others.
bool pads_partials(const FusedProblem& problem, const GemmPolicy& policy) {
  return problem.tail == Tail::kLogSumExp && policy.arch == 90 &&
         ceil_div(problem.gemm.n, policy.tile_n) % policy.swizzle != 0;
}

}  // namespace

bool is_skinny(const FusedProblem& problem) noexcept {
  const auto [m, n, k, precision, dtype] = problem.gemm;
  return problem.tail == Tail::kNone && std::min(m, n) <= skinny::kMostRows;
}

bool may_split_k(const FusedProblem& problem, const Links& links) noexcept {
  return problem.tail == Tail::kNone && !links.writes_planes && !links.reads_images;
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

GemmPolicy select_policy(const FusedProblem& problem, const Links& links,
                         const DeviceProps& device) noexcept {
  const auto [m, n, k, precision, dtype] = problem.gemm;
  if (may_split_k(problem, links) && !links.reads_planes && is_skinny(problem)) {
    GemmPolicy policy;
    policy.arch = kSkinny;
    policy.split_k = skinny::select_parts(m, n, k, device.sm_count).parts;
    return policy;
  }
  GemmPolicy policy = gemm::select_policy(problem.gemm, source_of(links), device);
  if (may_split_k(problem, links)) policy.split_k = select_split_k(problem.gemm, policy, device);
  if (pads_partials(problem, policy)) policy.swizzle = 1;
  GemmPolicy by_columns = policy;
  by_columns.raster = Raster::kAlongM;
  by_columns.swizzle = 1;
  if (exchanging_blocks(problem, by_columns, device) != 0) policy = by_columns;
  policy.trailing_blocks = select_trailing_blocks(problem, links, policy, device);
  return policy;
}

Status check(const FusedProblem& problem, const GemmPolicy& policy, const Links& links,
             const DeviceProps& device) {
  const bool skinny = policy.arch == kSkinny;
  CUTFUSE_CHECK(policy.split_k >= 1 && (!skinny || !links.reads_planes), Code::kNotSupported,
                "%s: split_k must be at least 1, and planes be multiplied by tensor cores",
                to_string(policy).c_str());
  if (!skinny) {
    if (Status status = check_policy(problem.gemm, policy); !status.ok()) return status;
  }
  CUTFUSE_CHECK(policy.source == source_of(links), Code::kNotSupported,
                "%s: images are what convolutions multiply, and nothing else",
                to_string(policy).c_str());
  CUTFUSE_CHECK((policy.split_k == 1 && !skinny) || may_split_k(problem, links),
                Code::kNotSupported,
                "%s splits K, which a reduction after the contraction does not allow",
                to_string(policy).c_str());
  CUTFUSE_CHECK(!pads_partials(problem, policy), Code::kNotSupported,
                "%s groups %lld columns with empty tiles, for which logsumexp has no partials",
                to_string(policy).c_str(), static_cast<long long>(problem.gemm.n));
  return check_trailing(problem, policy, links, device);
}

}  // namespace cutfuse::fused
