#include <algorithm>

#include "cutfuse/gemm.h"
#include "gemm/launcher.h"

namespace cutfuse {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Time of a policy in units of one 128x128 tile's mainloop: waves of persistent blocks times the
/// work of a tile. A cluster of two shares the loads of B (0.98 of the time: H200,
/// 16384x4096x4096); at equal area a 128x192 tile is no faster under the card's power cap.
double cost(const gemm::Instance& instance, const GemmProblem& problem, const DeviceProps& device) {
  const int64_t tiles_m =
      ceil_div(ceil_div(problem.m, instance.tile_m), instance.cluster_m) * instance.cluster_m;
  const int64_t tiles_n = ceil_div(problem.n, instance.tile_n);
  const int64_t slots =
      std::max<int64_t>(1, device.sm_count / instance.cluster_m) * instance.cluster_m;
  const auto waves = static_cast<double>(ceil_div(tiles_m * tiles_n, slots));
  const double area = double(instance.tile_m) * instance.tile_n / (128.0 * 128.0);
  return waves * area * (instance.cluster_m > 1 ? 0.98 : 1.0);
}

/// Whether the instance's error stays below PyTorch's on the problem (measured on rand, randn and
/// lognormal data over 48 x 48 ... 4096 x 1000 outputs and K = 64 ... 8192; H200). Its own error is
/// smallest where K is small and where few output tiles make cuBLAS split K: there only
/// promote_k = 16 does, and never a tile of 192 columns, which has no registers for blocked sums.
bool is_accurate(const gemm::Instance& instance, const GemmProblem& problem,
                 const DeviceProps& device) {
  const bool few_tiles = ceil_div(problem.m, 128) * ceil_div(problem.n, 128) <= device.sm_count;
  const bool finest = problem.k <= (few_tiles ? 2047 : 128);
  return instance.promote_k == (finest ? 16 : 64) && !(few_tiles && instance.tile_n > 128);
}

}  // namespace

bool operator==(const GemmPolicy& a, const GemmPolicy& b) noexcept {
  return a.tile_m == b.tile_m && a.tile_n == b.tile_n && a.cluster_m == b.cluster_m &&
         a.promote_k == b.promote_k && a.raster == b.raster && a.swizzle == b.swizzle;
}

std::string to_string(const GemmPolicy& policy) {
  return "GemmPolicy{" + std::to_string(policy.tile_m) + ", " + std::to_string(policy.tile_n) +
         ", " + std::to_string(policy.cluster_m) + ", " + std::to_string(policy.promote_k) +
         ", Raster::" + (policy.raster == Raster::kAlongN ? "kAlongN" : "kAlongM") + ", " +
         std::to_string(policy.swizzle) + "}";
}

GemmPolicy select_policy(const GemmProblem& problem, const DeviceProps& device) noexcept {
  int32_t count = 0;
  const gemm::Instance* all = gemm::instances(&count);
  const gemm::Instance* best =
      std::min_element(all, all + count, [&](const gemm::Instance& a, const gemm::Instance& b) {
        const bool a_fits = is_accurate(a, problem, device);
        const bool b_fits = is_accurate(b, problem, device);
        return a_fits != b_fits ? a_fits : cost(a, problem, device) < cost(b, problem, device);
      });
  if (best == all + count) {
    return {};
  }
  const int64_t tiles_m = ceil_div(problem.m, best->tile_m);
  const int64_t tiles_n = ceil_div(problem.n, best->tile_n);
  // Walk the shorter side first, so that the blocks in flight share operand tiles in L2 (the wrong
  // raster costs 12 % at 16384x4096x4096). From 32 tiles on, group 4 along the other side, where it
  // divides (padding would launch empty tiles): a quarter less memory traffic.
  const bool along_n = tiles_m >= tiles_n;
  const int64_t minor = along_n ? ceil_div(tiles_m, best->cluster_m) : tiles_n;
  const bool grouped = std::min(tiles_m, tiles_n) >= 32 && minor % 4 == 0;
  return {best->tile_m,
          best->tile_n,
          best->cluster_m,
          best->promote_k,
          along_n ? Raster::kAlongN : Raster::kAlongM,
          grouped ? 4 : 1};
}

int32_t compiled_policies(GemmPolicy* policies, int32_t capacity) noexcept {
  int32_t count = 0;
  const gemm::Instance* all = gemm::instances(&count);
  for (int32_t i = 0; i < std::min(count, capacity); ++i) {
    policies[i] = {all[i].tile_m,    all[i].tile_n,   all[i].cluster_m,
                   all[i].promote_k, Raster::kAlongM, 1};
  }
  return count;
}

}  // namespace cutfuse
