#include <algorithm>
#include <new>
#include <utility>

#include "core/status.h"
#include "cutfuse/gemm.h"
#include "gemm/launcher.h"

namespace cutfuse {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// sm_90a code runs on compute capability 9.0 and on nothing else, later ones included.
int32_t arch_of(const DeviceProps& device) {
  return device.major == 9 && device.minor == 0 ? 90 : 80;
}

/// Time of a policy in units of one 128x128 tile's mainloop: waves of persistent blocks times the
/// work of a tile. A cluster of two shares the loads of B (0.98 of the time: H200,
/// 16384x4096x4096); at equal area a 128x192 tile is no faster under the card's power cap. On
/// sm_80 a 64x64 tile reads twice as much per product (estimated, not measured).
double cost(const gemm::Instance& instance, const GemmProblem& problem, const DeviceProps& device) {
  const int64_t tiles_m =
      ceil_div(ceil_div(problem.m, instance.tile_m), instance.cluster_m) * instance.cluster_m;
  const int64_t tiles_n = ceil_div(problem.n, instance.tile_n);
  const int64_t slots =
      std::max<int64_t>(1, device.sm_count / instance.cluster_m) * instance.cluster_m;
  const auto waves = static_cast<double>(ceil_div(tiles_m * tiles_n, slots));
  const double area = double(instance.tile_m) * instance.tile_n / (128.0 * 128.0);
  // Unpromoted tiles of 256 columns read shared memory least.
  const double reads = instance.tile_n == 256 ? 0.9 : instance.tile_n == 64 ? 1.25 : 1.0;
  return waves * area * reads * (instance.cluster_m > 1 ? 0.98 : 1.0);
}

/// Whether the instance's error stays below PyTorch's on the problem (measured on rand, randn and
/// lognormal data over 48 x 48 ... 4096 x 1000 outputs and K = 64 ... 8192; H200). Its own error is
/// smallest where K is small and where few output tiles make cuBLAS split K: there only
/// promote_k = 16 does, and never a tile of 192 columns, which has no registers for blocked sums;
/// on sm_80 only tiles of 64 columns have. There the finest but one is 32, the K tile.
bool is_accurate(const gemm::Instance& instance, const GemmProblem& problem,
                 const DeviceProps& device) {
  if (plane_count(problem) != 2) {
    return true;
  }
  const bool few_tiles = ceil_div(problem.m, 128) * ceil_div(problem.n, 128) <= device.sm_count;
  const bool finest = problem.k <= (few_tiles ? 2047 : 128);
  const bool is_sm80 = instance.arch == 80;
  const bool blocked = instance.tile_n <= (is_sm80 ? 64 : 128);
  return instance.promote_k == (finest ? 16 : is_sm80 ? 32 : 64) && (blocked || !few_tiles);
}

DType element_of(const GemmProblem& problem) {
  return problem.dtype == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat16;
}

bool multiplies(const gemm::Instance& instance, const GemmProblem& problem) {
  const bool splits = plane_count(problem) == 2;
  if (instance.source == Source::kNchw) {  // in fp32, at TF32 as it is
    return problem.dtype == DType::kFloat32 &&
           (instance.element == DType::kFloat32 ? problem.precision == Precision::kTf32 : splits);
  }
  const bool turned = instance.source == Source::kTurned;
  const DType element = turned ? problem.dtype : element_of(problem);
  return instance.element == element && (instance.promote_k != 0) == splits;
}

const char* name(Raster raster) {
  return raster == Raster::kAlongN ? "Raster::kAlongN" : "Raster::kAlongM";
}

const char* name(Source source) {
  return source == Source::kMatrix   ? "Source::kMatrix"
         : source == Source::kImages ? "Source::kImages"
         : source == Source::kNchw   ? "Source::kNchw"
                                     : "Source::kTurned";
}

const char* name(DType dtype) {
  return dtype == DType::kFloat32   ? "DType::kFloat32"
         : dtype == DType::kFloat16 ? "DType::kFloat16"
                                    : "DType::kBFloat16";
}

/// Tensors of 16 bits are multiplied at a pace at which memory traffic takes power from the tensor
/// cores. Where B is larger than the half of L2 that an SM reads, nothing of it stays there from
/// one wave of blocks to the next: each reads its rows and columns anew (16384x4096x4096: 671 MB
/// where 16 x 8 tiles of 128x256 at a time read 532; 2 % of its time by six pairs of turns, from
/// -1 to 6; H100). Eight columns of tiles are walked together where that is a tenth less.
void group_columns(const GemmProblem& problem, int64_t tiles_m, int64_t tiles_n,
                   GemmPolicy* policy) {
  constexpr double kCache = 25e6;
  const int64_t features = policy->source == Source::kTurned ? problem.m : problem.n;
  if (2.0 * double(features) * double(problem.k) <= kCache) return;
  constexpr int64_t kColumns = 8;
  constexpr int64_t kBlocks = 128;  // in flight, about
  const auto read = [&](int64_t rows) {
    return rows * policy->tile_m + kBlocks / rows * policy->tile_n;
  };
  const int64_t rows =
      policy->raster == Raster::kAlongN
          ? std::max<int64_t>(kBlocks / tiles_n, policy->swizzle * policy->cluster_m)
          : std::min(tiles_m, kBlocks);
  // The scheduler pads rows, too: no more than 3 % of the tiles may be empty.
  const int64_t clusters = ceil_div(tiles_m, policy->cluster_m);
  const int64_t empty = ceil_div(clusters, kColumns) * kColumns - clusters;
  const bool fits = tiles_m >= kBlocks / kColumns && tiles_n % kColumns == 0;
  if (!fits || 32 * empty > clusters ||
      10 * read(kBlocks / kColumns) > 9 * read(std::max<int64_t>(rows, 1)))
    return;
  policy->raster = Raster::kAlongM;
  policy->swizzle = kColumns;
}

}  // namespace

GemmPolicy gemm::policy_of(const Instance& instance) noexcept {
  GemmPolicy policy;
  policy.tile_m = instance.tile_m;
  policy.tile_n = instance.tile_n;
  policy.cluster_m = instance.cluster_m;
  policy.promote_k = instance.promote_k;
  policy.arch = instance.arch;
  policy.element = instance.element;
  policy.source = instance.source;
  return policy;
}

bool operator==(const GemmPolicy& a, const GemmPolicy& b) noexcept {
  return a.tile_m == b.tile_m && a.tile_n == b.tile_n && a.cluster_m == b.cluster_m &&
         a.promote_k == b.promote_k && a.raster == b.raster && a.swizzle == b.swizzle &&
         a.split_k == b.split_k && a.arch == b.arch && a.element == b.element &&
         a.source == b.source && a.trailing_blocks == b.trailing_blocks;
}

std::string to_string(const GemmPolicy& policy) {
  const auto number = [](int32_t value) { return std::to_string(value) + ", "; };
  const bool trails = policy.trailing_blocks != 0;
  return "GemmPolicy{" + number(policy.tile_m) + number(policy.tile_n) + number(policy.cluster_m) +
         number(policy.promote_k) + name(policy.raster) + ", " + number(policy.swizzle) +
         number(policy.split_k) + number(policy.arch) + name(policy.element) +
         (policy.source != Source::kMatrix || trails ? std::string(", ") + name(policy.source)
                                                     : "") +
         (trails ? ", " + std::to_string(policy.trailing_blocks) : "") + "}";
}

GemmPolicy select_policy(const GemmProblem& problem, const DeviceProps& device) noexcept {
  return gemm::select_policy(problem, Source::kMatrix, device);
}

GemmPolicy gemm::select_policy(const GemmProblem& problem, Source source,
                               const DeviceProps& device) noexcept {
  int32_t count = 0;
  const gemm::Instance* all = gemm::instances(&count);
  const gemm::Instance* best = nullptr;
  const auto better = [&](const gemm::Instance& a, const gemm::Instance& b) {
    const bool a_fits = is_accurate(a, problem, device);
    const bool b_fits = is_accurate(b, problem, device);
    return a_fits != b_fits ? a_fits : cost(a, problem, device) < cost(b, problem, device);
  };
  for (const gemm::Instance* one = all; one != all + count; ++one) {
    if (one->arch != arch_of(device) || one->source != source || !multiplies(*one, problem)) {
      continue;
    }
    if (best == nullptr || better(*one, *best)) best = one;
  }
  if (best == nullptr) {
    return {};
  }
  const int64_t tiles_m = ceil_div(problem.m, best->tile_m);
  const int64_t tiles_n = ceil_div(problem.n, best->tile_n);
  // Walk the shorter side first, so that the blocks in flight share operand tiles in L2 (the wrong
  // raster costs 12 % at 16384x4096x4096). From 32 tiles on, group 4 along the other side, a
  // quarter less memory traffic: where that divides and, of the shorter side, which the scheduler
  // pads as well, no more than 3 % of the tiles would be empty (not measured).
  const bool along_n = tiles_m >= tiles_n;
  const int64_t clusters = ceil_div(tiles_m, best->cluster_m);
  const auto [minor, major] = along_n ? std::pair(clusters, tiles_n) : std::pair(tiles_n, clusters);
  const bool divides = minor % 4 == 0 && 32 * (ceil_div(major, 4) * 4 - major) <= major;
  const bool grouped = std::min(tiles_m, tiles_n) >= 32 && divides;
  GemmPolicy policy = gemm::policy_of(*best);
  policy.raster = along_n ? Raster::kAlongN : Raster::kAlongM;
  // sm_80 pads nothing; about 100 blocks in flight are then near a square, 8 x 13 (not measured).
  policy.swizzle = best->arch == 80 ? 8 : grouped ? 4 : 1;
  const bool matrices = source == Source::kMatrix || source == Source::kTurned;
  if (best->arch == 90 && matrices && problem.dtype != DType::kFloat32) {
    group_columns(problem, tiles_m, tiles_n, &policy);
  }
  return policy;
}

int64_t gemm::padded_tile_rows(const GemmProblem& problem, const GemmPolicy& policy) noexcept {
  return ceil_div(ceil_div(problem.m, policy.tile_m), policy.cluster_m) * policy.cluster_m;
}

/// 128 instead of 132 are 1.3 % faster, as they share operand tiles in L2 evenly and leave power to
/// others (16384x4096x4096; H200). Of few waves that would be many blocks less, which was not
/// measured.
int32_t gemm::persistent_blocks(const GemmProblem& problem, const GemmPolicy& policy,
                                const DeviceProps& device) noexcept {
  const auto padded = [&](int64_t size, int64_t tile, int64_t cluster) {
    const int64_t step = cluster * policy.swizzle;
    return ceil_div(ceil_div(size, tile), step) * step;
  };
  const int64_t cluster = policy.cluster_m;
  const int64_t tiles = padded(problem.m, policy.tile_m, cluster) *
                        padded(problem.n, policy.tile_n, 1) * policy.split_k;
  const int64_t most = (device.sm_count - policy.trailing_blocks) / cluster * cluster;
  const int64_t waves = ceil_div(tiles, std::max<int64_t>(most, 1));
  if (waves < 4) return static_cast<int32_t>(device.sm_count - policy.trailing_blocks);
  return static_cast<int32_t>(ceil_div(tiles, cluster * waves) * cluster);
}

int32_t gemm::blocks_of_whole_columns(const GemmProblem& problem, const GemmPolicy& policy,
                                      const DeviceProps& device) noexcept {
  constexpr int64_t kMost = 16;  // tiles: more would stream A through L2 for every column
  const bool turned = policy.source == Source::kTurned;
  const Raster raster = turned ? Raster::kAlongN : Raster::kAlongM;
  if (policy.arch != 90 || policy.raster != raster || policy.swizzle != 1 || policy.split_k != 1) {
    return 0;
  }
  const int64_t rows = padded_tile_rows(problem, policy);
  const int64_t columns = ceil_div(problem.n, policy.tile_n);
  if (rows == 0 || columns == 0 || (turned ? columns : rows) > kMost) return 0;
  // Of a turned layer the rows of a cluster are multiplied side by side.
  const int64_t together = turned ? columns * policy.cluster_m : rows;
  const int64_t groups = turned ? rows / policy.cluster_m : columns;
  if (together > device.sm_count) return 0;
  const int64_t waves = ceil_div(groups, device.sm_count / together);
  // A pass over the result costs more than one wave of 32.
  if (32 * waves > 33 * ceil_div(rows * columns, device.sm_count)) return 0;
  return static_cast<int32_t>(together * ceil_div(groups, waves));
}

Status check_policy(const GemmProblem& problem, const GemmPolicy& policy) noexcept try {
  const gemm::Instance* instance = gemm::find_instance(policy);
  CUTFUSE_CHECK(instance != nullptr, Code::kNotSupported,
                "%s is not compiled; compiled_policies() lists what is", to_string(policy).c_str());
  CUTFUSE_CHECK(multiplies(*instance, problem), Code::kNotSupported,
                "%s does not multiply %s: promote_k is 0 except at ieee, and the element is the "
                "tensors' or the planes'",
                to_string(policy).c_str(), to_string(problem).c_str());
  constexpr int32_t kMost = 1024;  // of either; grids have 32-bit sizes
  const auto fits = [](int32_t number) { return number >= 1 && number <= kMost; };
  CUTFUSE_CHECK(fits(policy.split_k) && fits(policy.swizzle), Code::kInvalidValue,
                "%s: split_k and swizzle must be from 1 to %d", to_string(policy).c_str(), kMost);
  return {};
} catch (const std::bad_alloc&) {
  return error(Code::kOutOfMemory, "no host memory to say why");
}

int32_t compiled_policies(GemmPolicy* policies, int32_t capacity) noexcept {
  int32_t count = 0;
  const gemm::Instance* all = gemm::instances(&count);
  int32_t found = 0;
  for (int32_t i = 0; i < count; ++i) {
    if (all[i].source != Source::kMatrix) continue;
    if (found < capacity) policies[found] = gemm::policy_of(all[i]);
    ++found;
  }
  return found;
}

}  // namespace cutfuse
