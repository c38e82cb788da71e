/// \file
#include "conv/policy.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "conv/problem.h"
#include "core/status.h"

namespace cutfuse {
namespace conv {
namespace {

int32_t planes_of(const ConvProblem& p) {
  return p.dtype == DType::kFloat32 && p.precision == Precision::kIeee ? 2 : 1;
}

DType element_of(const ConvProblem& p) {
  return p.dtype == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat16;
}

int32_t round_up(int64_t a, int32_t b) { return static_cast<int32_t>((a + b - 1) / b * b); }

/// Strips of equal width that tile_n pixels can take, from few to many; or 0, whole rows.
std::vector<int32_t> strips_of(const ConvProblem& p, int32_t tile_n) {
  std::vector<int32_t> widths = {0};
  const int64_t widest = tile_n - shift::kSector;
  if (p.out_width >= 32) {
    const int64_t fewest = (p.out_width + widest - 1) / widest;
    widths.push_back(round_up((p.out_width + fewest - 1) / fewest, shift::kSector));
  }
  return widths;
}

}  // namespace

const shift::Instance* find_instance(const ConvPolicy& policy) noexcept {
  int32_t count = 0;
  const shift::Instance* all = shift::instances(&count);
  const shift::Instance* found = std::find_if(all, all + count, [&](const auto& instance) {
    return instance.element == policy.element && instance.tile_n == policy.tile_n &&
           instance.planes == policy.planes;
  });
  return found == all + count ? nullptr : found;
}

double estimate(const FusedConvProblem& problem, const ConvPolicy& policy,
                const shift::Layout& layout, const DeviceProps& device) noexcept {
  const shift::Geometry& g = layout.g;
  const ConvProblem& p = problem.conv;
  constexpr double kCyclesPerMicrosecond = 1600.0;
  double steps = 0.0;
  for (const int32_t count : layout.chunk_steps) steps += count;
  const double products = policy.planes == 2 ? 3.0 : 1.0;
  // Cycles of one tile on one multiprocessor.
  const double multiply = 2.0 * steps * products * std::max(policy.tile_n / 2.0, 32.0) * 1.1;
  const double read = double(g.patch) * g.lane_groups * (policy.planes == 2 ? 0.55 : 0.45) + 500.0;
  const double store = 2.0 * policy.tile_n * g.warp_channels * 4 * 0.12 + 700.0;
  const double weights =
      g.slab_ring >= g.slabs ? 0.0 : double(g.slabs) * layout.shared.slab_bytes / 20.0;
  const double tile = std::max({multiply, read, weights, (multiply + store) * 0.75});
  const double rounds = std::ceil(double(layout.tile_count) / device.sm_count);
  const double compute = (rounds * tile + multiply + store) / kCyclesPerMicrosecond;
  const double in = double(p.batch) * p.channels * p.height * p.width * size_of(p.dtype);
  const double out =
      double(p.batch) * p.out_channels * p.out_height * p.out_width * size_of(p.dtype);
  const double memory = (in + out) / 3.6e6;
  return std::max(compute, memory) + 4.0;
}

Status select_policy(const FusedConvProblem& problem, const DeviceProps& device, ConvPolicy* policy,
                     shift::Layout* layout) noexcept {
  const ConvProblem p = as_convolution(problem.conv);
  const int32_t planes = planes_of(p);
  const DType element = element_of(p);
  double best = INFINITY;
  Status reason = error(Code::kNotSupported, "no convolution kernel multiplies %s",
                        to_string(problem.conv).c_str());
  int32_t count = 0;
  const shift::Instance* all = shift::instances(&count);
  for (int32_t i = 0; i < count; ++i) {
    if (all[i].planes != planes || all[i].element != element) continue;
    for (const int32_t strip : strips_of(p, all[i].tile_n)) {
      for (const int32_t m_blocks : {1, 2}) {
        for (const int32_t chunk : {0, 64, 32, 16}) {
          for (const int32_t stages : {3, 2}) {
            const ConvPolicy candidate{all[i].tile_n, planes, element, m_blocks,
                                       strip,         chunk,  stages};
            shift::Layout found;
            const Status status = shift::lay_out(p, candidate, device, &found);
            if (!status.ok()) {
              if (best == INFINITY) reason = status;
              continue;
            }
            const double time = estimate(problem, candidate, found, device);
            if (time < best) {
              best = time;
              *policy = candidate;
              *layout = std::move(found);
            }
            break;  // fewer stages or smaller chunks are no better
          }
        }
      }
    }
  }
  return best < INFINITY ? Status{} : reason;
}

}  // namespace conv

bool operator==(const ConvPolicy& a, const ConvPolicy& b) noexcept {
  return a.tile_n == b.tile_n && a.planes == b.planes && a.element == b.element &&
         a.m_blocks == b.m_blocks && a.strip == b.strip && a.chunk == b.chunk &&
         a.stages == b.stages;
}

std::string to_string(const ConvPolicy& policy) {
  char text[128];
  std::snprintf(text, sizeof(text), "ConvPolicy{%d, %d, DType::%s, %d, %d, %d, %d}", policy.tile_n,
                policy.planes, policy.element == DType::kBFloat16 ? "kBFloat16" : "kFloat16",
                policy.m_blocks, policy.strip, policy.chunk, policy.stages);
  return text;
}

int32_t compiled_policies(ConvPolicy* policies, int32_t capacity) noexcept {
  int32_t count = 0;
  const conv::shift::Instance* all = conv::shift::instances(&count);
  for (int32_t i = 0; i < std::min(count, capacity); ++i) {
    policies[i] = ConvPolicy{};
    policies[i].tile_n = all[i].tile_n;
    policies[i].planes = all[i].planes;
    policies[i].element = all[i].element;
  }
  return count;
}

}  // namespace cutfuse
