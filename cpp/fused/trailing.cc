/// \file
/// Which rows are split while the first tiles are multiplied. Of the operand along the raster's
/// slow side the tiles are met one after the other; every wave leaves blocks of their own the time
/// to split what the next one needs.
#include <algorithm>
#include <cmath>

#include "core/status.h"
#include "fused/estimate.h"
#include "fused/plan.h"

namespace cutfuse::fused {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Bytes of fp32 that a block splits in a microsecond beside a contraction: into two planes 32 to
/// 46 thousand, into one 45 to 48 (H100).
double block_rate(const GemmProblem& problem) { return plane_count(problem) == 2 ? 3.6e4 : 4.5e4; }

/// Of a wave's products, so that no tile waits: the estimate is of few waves, and 256 columns slow
/// down more under the card's power cap.
double wave_time(const GemmProblem& problem, const GemmPolicy& policy) {
  return (policy.tile_n == 256 ? 1.1 : 0.95) * contraction_time(problem, policy);
}

constexpr double kDelay = 5.0;  // before the first row
constexpr int64_t kMostBlocks = 16;
constexpr double kLeastGain = 3.0;

bool may_trail(const FusedProblem& problem, const Links& links, const GemmPolicy& policy) {
  return problem.gemm.m > 0 && problem.gemm.n > 0 && policy.arch == 90 &&
         policy.source == Source::kMatrix && policy.split_k == 1 && plane_count(problem.gemm) > 0 &&
         !links.reads_planes && problem.gemm.k <= 8192 && problem.gemm.k % 8 == 0 &&
         (policy.raster == Raster::kAlongN || !problem.weight_planes);
}

/// SMs that get no tile in some wave although all take as few waves as there can be.
int64_t spare_blocks(const FusedProblem& fused, const GemmPolicy& policy,
                     const DeviceProps& device) {
  if (const int32_t exchanging = exchanging_blocks(fused, policy, device); exchanging != 0) {
    return device.sm_count - exchanging;
  }
  const GemmProblem& problem = fused.gemm;
  const int64_t cluster = policy.cluster_m;
  const int64_t tiles =
      gemm::padded_tile_rows(problem, policy) * ceil_div(problem.n, policy.tile_n);
  const int64_t most = std::max<int64_t>(device.sm_count / cluster * cluster, 1);
  return device.sm_count - ceil_div(tiles, cluster * ceil_div(tiles, most)) * cluster;
}

}  // namespace

TrailingPart trailing_part(const FusedProblem& problem, const GemmPolicy& policy,
                           const DeviceProps& device) noexcept {
  const auto [m, n, k, precision, dtype] = problem.gemm;
  const bool of_x = policy.raster == Raster::kAlongN;
  const int64_t rows = of_x ? m : n;
  const int64_t tile_rows = of_x ? policy.tile_m : policy.tile_n;
  const int64_t group = policy.swizzle * (of_x ? policy.cluster_m : 1);
  const int64_t others =
      of_x ? ceil_div(n, policy.tile_n) : gemm::padded_tile_rows(problem.gemm, policy);
  const int32_t exchanging = exchanging_blocks(problem, policy, device);
  const int64_t blocks =
      exchanging != 0 ? exchanging : gemm::persistent_blocks(problem.gemm, policy, device);
  const double wave = wave_time(problem.gemm, policy);
  const double rate = policy.trailing_blocks * block_rate(problem.gemm) / (4.0 * double(k));
  double first = 0.0;
  for (int64_t tile = 0; tile * tile_rows < rows; ++tile) {
    const auto end = static_cast<double>(std::min(rows, (tile + 1) * tile_rows));
    const auto begins = static_cast<double>(tile / group * group * others / blocks);
    first = std::max(first, end - rate * std::max(begins * wave - kDelay, 0.0));
  }
  const int64_t first_tile = ceil_div(static_cast<int64_t>(std::ceil(first)), tile_rows);
  return {of_x, static_cast<int32_t>(std::min(first_tile * tile_rows, rows)),
          static_cast<int32_t>(tile_rows), static_cast<int32_t>(ceil_div(rows, tile_rows))};
}

double trailing_gain(const FusedProblem& problem, const GemmPolicy& policy,
                     const DeviceProps& device) noexcept {
  const TrailingPart part = trailing_part(problem, policy, device);
  const int64_t rows = (part.of_x ? problem.gemm.m : problem.gemm.n) - part.first_row;
  const double bytes = 4.0 + 2.0 * plane_count(problem.gemm);
  return double(rows) * double(problem.gemm.k) * bytes / kBandwidth - kLaunch;
}

int32_t select_trailing_blocks(const FusedProblem& problem, const Links& links,
                               const GemmPolicy& policy, const DeviceProps& device) noexcept {
  if (!may_trail(problem, links, policy)) return 0;
  GemmPolicy trailing = policy;
  trailing.trailing_blocks =
      static_cast<int32_t>(std::min(spare_blocks(problem, policy, device), kMostBlocks) / 2 * 2);
  if (trailing.trailing_blocks < 2) return 0;
  return trailing_gain(problem, trailing, device) >= kLeastGain ? trailing.trailing_blocks : 0;
}

Status check_trailing(const FusedProblem& problem, const GemmPolicy& policy, const Links& links,
                      const DeviceProps& device) {
  const int32_t blocks = policy.trailing_blocks;
  if (blocks == 0) return {};
  CUTFUSE_CHECK(
      may_trail(problem, links, policy), Code::kNotSupported,
      "%s: rows are split beside sm_90's contraction of matrices alone, of fp32 with K at "
      "most 8192 and a multiple of 8, and not in parts of K",
      to_string(policy).c_str());
  const int32_t others = std::max(policy.cluster_m, exchanging_blocks(problem, policy, device));
  CUTFUSE_CHECK(blocks > 0 && blocks % 2 == 0 && blocks <= device.sm_count - others,
                Code::kInvalidValue,
                "%s: trailing blocks come in pairs and leave the contraction's on %d SMs",
                to_string(policy).c_str(), device.sm_count);
  return {};
}

}  // namespace cutfuse::fused
