/// \file
/// Which kernel a fused problem takes and how its tail runs.
#include <algorithm>
#include <cmath>
#include <utility>

#include "core/status.h"
#include "fused/estimate.h"
#include "fused/plan.h"
#include "gemm/limits.h"
#include "simt/multiply.h"
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
         policy.source != Source::kTurned &&
         ceil_div(problem.gemm.n, policy.tile_n) % policy.swizzle != 0;
}

/// Whether `blocks` blocks a tile run on the device and add up k products exactly enough.
bool sums(const simt::Tile& tile, int32_t blocks, int64_t k, const DeviceProps& device) {
  const bool is_power = blocks >= 1 && blocks <= simt::kMostBlocks && (blocks & (blocks - 1)) == 0;
  return is_power && (blocks == 1 || device.major >= 9) && simt::sums(tile, blocks, k);
}

}  // namespace

bool is_skinny(const FusedProblem& problem) noexcept {
  const auto [m, n, k, precision, dtype] = problem.gemm;
  return problem.tail == Tail::kNone && std::min(m, n) <= skinny::kMostRows;
}

bool may_split_k(const FusedProblem& problem, const Links& links) noexcept {
  return problem.tail == Tail::kNone && !links.writes_planes && !links.reads_images;
}

bool is_simple(const FusedProblem& problem, const Links& links) noexcept {
  // A frozen weight is what its planes hold.
  const bool frozen = problem.weight_planes && problem.gemm.k >= kMinK;
  return may_split_k(problem, links) && !links.reads_planes && !frozen;
}

int32_t simt_tile(const GemmPolicy& policy) noexcept {
  return simt::index_of({policy.tile_m, policy.tile_n, policy.split_k});
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
  // Of results of 16 bits that leave in boxes the tensor cores take the moments, and the pass reads
  // half as much: 1024x8192x8192 in bf16 took 2 % more without it, 1024x4096x4096 8 %. Turned over
  // the first took 7 % less and the second as long, but of 4096 rows 3 to 10 % more (H200).
  constexpr int64_t kFewRows = 1024;
  const bool boxes = size_of(problem.gemm.dtype) == 2 && problem.gemm.n % 8 == 0;
  const bool few_turned = policy.source == Source::kTurned && problem.gemm.m <= kFewRows;
  if (!fits || (boxes && !few_turned)) return 0;
  return gemm::blocks_of_whole_columns(multiplied(problem.gemm, policy), policy, device);
}

bool may_turn(const FusedProblem& problem, const Links& links) noexcept {
  const bool linked = links.reads_planes || links.writes_planes || links.reads_images;
  const bool eval = problem.tail == Tail::kBatchNormEval;
  const bool wide = problem.gemm.dtype == DType::kFloat32;
  const bool reduces = problem.tail == Tail::kLogSumExp;
  // Results of 16 bits leave in boxes.
  const bool fits = wide ? problem.gemm.precision == Precision::kTf32 && !reduces
                         : problem.gemm.n % 8 == 0 || reduces;
  if (!fits || problem.weight_planes || linked) return false;
  const auto is_affine = [](const Program& program, int32_t count) {
    return std::all_of(program.steps, program.steps + count,
                       [](const Step& step) { return gemm::is_affine(step.op); });
  };
  // What the epilogue runs ends in this program.
  const Program& last = eval ? problem.after : problem.program;
  float lowest, highest;
  // In training, they would come before the moments.
  const bool ends = problem.tail != Tail::kBatchNormTrain && last.count > 0 &&
                    (bounds_of(last.steps[last.count - 1], &lowest, &highest) ||
                     (!wide && last.steps[last.count - 1].op == Op::kSigmoid));
  return is_affine(last, last.count - (ends ? 1 : 0)) &&
         (!eval || is_affine(problem.program, problem.program.count));
}

GemmProblem multiplied(const GemmProblem& problem, const GemmPolicy& policy) noexcept {
  GemmProblem turned = problem;
  if (policy.source == Source::kTurned) std::swap(turned.m, turned.n);
  return turned;
}

GemmPolicy select_large_policy(const FusedProblem& problem, const Links& links,
                               const DeviceProps& device) noexcept {
  const GemmPolicy straight = select_straight_policy(problem, links, device);
  if (!may_turn(problem, links) || straight.arch != 90) return straight;
  GemmPolicy like;
  like.source = Source::kTurned;
  const GemmPolicy turned =
      gemm::select_policy(multiplied(problem.gemm, like), Source::kTurned, device);
  if (turned.tile_m == 0) return straight;
  if (problem.gemm.dtype != DType::kFloat32) {
    // Both warpgroups read all of x then, and of a positive one the board's power limit allows
    // more: 16384x4096x4096 and 1024x8192x8192 took 3 to 4 % less, in training 5, and of normal
    // numbers 1 (H200).
    return straight.tile_n == 256 && straight.split_k == 1 ? turned : straight;
  }
  // Where x has more rows its own pass is the longer one. Of 42 sizes, 128 to 4096 rows, the
  // straight ones took 1.06 of what is expected (H100).
  const double other = 1.06 * expected(problem, links, straight, device);
  const bool few_rows = problem.gemm.m <= problem.gemm.n;
  return few_rows && expected(problem, links, turned, device) < other ? turned : straight;
}

GemmPolicy select_policy(const FusedProblem& problem, const Links& links,
                         const DeviceProps& device) noexcept {
  GemmPolicy best = select_large_policy(problem, links, device);
  if (!is_simple(problem, links)) return best;
  const bool unfit = is_shallow(problem.gemm) && best.arch != kSkinny;
  double least = unfit ? INFINITY : expected(problem, links, best, device);
  for (const simt::Tile& tile : simt::kTiles) {
    for (int32_t blocks = 1; blocks <= simt::kMostBlocks; blocks *= 2) {
      if (!sums(tile, blocks, problem.gemm.k, device)) continue;
      GemmPolicy policy;
      policy.arch = kSimt;
      policy.promote_k = 0;
      policy.tile_m = tile.m;
      policy.tile_n = tile.n;
      policy.split_k = tile.groups;
      policy.cluster_m = blocks;
      const double time = expected(problem, links, policy, device);
      if (time >= least) continue;
      best = policy;
      least = time;
    }
  }
  return best;
}

GemmPolicy select_straight_policy(const FusedProblem& problem, const Links& links,
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
  if (policy.arch == kSimt) {
    const int32_t tile = simt_tile(policy);
    CUTFUSE_CHECK(
        tile >= 0 && sums(simt::kTiles[tile], policy.cluster_m, problem.gemm.k, device) &&
            is_simple(problem, links),
        Code::kNotSupported,
        "%s is no tile that is compiled, or fp32 units do not run the problem: a tail, a "
        "frozen weight, more of K than its parts add up exactly enough, or clusters of other than "
        "1, 2, 4 or 8 blocks, or of more than one without four parts of K or before compute "
        "capability 9.0",
        to_string(policy).c_str());
    return check_trailing(problem, policy, links, device);
  }
  const bool skinny = policy.arch == kSkinny;
  CUTFUSE_CHECK(policy.split_k >= 1 && (!skinny || !links.reads_planes), Code::kNotSupported,
                "%s: split_k must be at least 1, and planes be multiplied by tensor cores",
                to_string(policy).c_str());
  if (!skinny) {
    if (Status status = why_not(problem.gemm, device); !status.ok()) return status;
    if (Status status = check_policy(problem.gemm, policy); !status.ok()) return status;
  }
  const bool turned = policy.source == Source::kTurned;
  CUTFUSE_CHECK(turned || policy.source == source_of(links), Code::kNotSupported,
                "%s: images are what convolutions multiply, and nothing else",
                to_string(policy).c_str());
  CUTFUSE_CHECK(
      !turned || (may_turn(problem, links) && policy.split_k == 1), Code::kNotSupported,
      "%s turns over fp32 layers at tf32 with a weight that is not frozen, without logsumexp, and "
      "16-bit ones with it or with N a multiple of 8, of a program of affine steps and bounds, in "
      "16 bits a sigmoid, not in parts of K",
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
