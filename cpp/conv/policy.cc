/// \file
#include "conv/policy.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "conv/patches/params.h"
#include "conv/problem.h"
#include "core/status.h"
#include "gemm/launcher.h"

namespace cutfuse {
namespace conv {
namespace {

int32_t planes_of(const ConvProblem& p) {
  return p.dtype == DType::kFloat32 && p.precision == Precision::kIeee ? 2 : 1;
}

/// Of the planes: scaled, fp16 holds bf16's significand too.
constexpr DType kElement = DType::kFloat16;

/// Whether enough of x is on its way to hide DRAM's latency: 16 KiB a multiprocessor.
bool reads_ahead(const ConvPolicy& policy, const shift::Layout& layout) {
  const int32_t warps = shift::producers(policy.tile_n, policy.planes) / 32;
  return warps * layout.g.raw_depth * layout.g.together * shift::kRawItemBytes >= 16384;
}

/// Whether one box of staging may leave while the next is written.
bool stores_ahead(const shift::Layout& layout) {
  return layout.shared.staging_boxes > 1 || layout.g.warp_channels <= shift::kLanes;
}

/// Strips of equal width that tile_n pixels can take, from few to many; or 0, whole rows.
std::vector<int32_t> strips_of(const ConvProblem& p, int32_t tile_n) {
  std::vector<int32_t> widths = {0};
  const int64_t widest = tile_n - shift::kSector;
  if (p.out_width >= 32) {
    const int64_t fewest = shift::ceil_div(p.out_width, widest);
    widths.push_back(shift::round_up(shift::ceil_div(p.out_width, fewest), shift::kSector));
  }
  return widths;
}

/// What reading and storing take longer than those of fp32 NCHW, as parts of that.
struct More {
  double items, stored;
};

/// From 13 problems on an H200.
More more_of(const FusedConvProblem& problem, const shift::Geometry& g) {
  const bool sixteen = problem.conv.dtype != DType::kFloat32;
  const bool two = planes_of(problem.conv) == 2;
  const bool last = problem.channels_last;
  More more;
  // Of channels_last two to four channels of a pixel come together where their number allows it.
  const bool apart = last && !two && !sixteen && problem.conv.channels % 4 != 0;
  more.items = last ? (two ? 0.1 : apart ? 2.5 : sixteen ? 1.5 : 1.2) : sixteen ? 2.0 : 0.0;
  more.stored = last ? (two ? 1.5 : 0.5) : sixteen ? 4.0 : 0.0;
  if (g.made.phases() > 1) more.stored = last ? 26.0 : 14.0;
  return more;
}

/// What reading takes longer where pixels are skipped, at ieee: from 138 launches on an H100 and an
/// H200.
double strided(const FusedConvProblem& problem) {
  const ConvProblem& p = problem.conv;
  const bool measured = planes_of(p) == 2 && p.groups == 1 && !p.transposed;
  const bool skips = p.stride_h > 1 || p.stride_w > 1;
  return measured && skips && !problem.channels_last ? 1.5 : 1.0;
}

/// Of fp32 NCHW in one group by one plane, with packing. Least squares over 458 launches of 166
/// problems, by graph replay from a cold L2 on an H100 and an H200, median error 7 %; and 4 us, as
/// much as conv/eager.cc says too much of PyTorch's shortest. What it chooses takes 1.03 of the
/// shortest.
double estimate_plain(const FusedConvProblem& problem, const shift::Layout& layout, int32_t tile_n,
                      double cycles, double stored, double passes, double tiles) {
  const ConvProblem& p = problem.conv;
  const shift::Geometry& g = layout.g;
  const bool strided = p.stride_h > 1 || p.stride_w > 1, pieces = g.piece_rows > 0;
  const double reading =
      0.88 * g.chunks * (strided ? 1.27 : 1.0) +
      (pieces ? 0.1 : 0.26) * double(layout.busiest_items) * (strided ? 1.93 : 1.0);
  const double tile =
      reading + (tile_n <= 128 ? 1.0e-3 : 6.9e-4) * cycles + (pieces ? 7.8e-4 : 1.16e-3) * stored;
  double factor = !weights_stay(g) ? 1.06 : tile_n == 256 ? 0.9 : 1.0;
  if (!pieces && tiles >= 12.0) factor *= 0.87;
  const double rows = double(p.height) * std::min(1.0, double(p.kernel_h) / double(p.stride_h));
  const double bytes = 4.0 * double(p.batch) *
                       (passes * double(p.channels) * rows * double(p.width) +
                        double(p.out_channels) * double(p.out_height) * double(p.out_width));
  return 13.5 + std::max(tiles * tile * factor, bytes / 2.9e6);
}

/// Of fp32 channels_last in one group, of whole vectors of channels, with packing. Least squares
/// over 522 launches of 20 problems at both tiers, by graph replay from a cold L2 on an H200,
/// median error 9 % at tf32 and 7 % at ieee; what it chooses takes 1.02 and 1.01 of the shortest.
double estimate_last(const shift::Geometry& g, const ConvPolicy& policy, double items,
                     double cycles, double tiles) {
  const bool pieces = g.piece_rows > 0, ring = !weights_stay(g);
  if (policy.planes == 2) {
    return 25.5 + tiles * (2.29 * g.chunks + 0.0122 * policy.tile_n +
                           (ring ? 6.2e-4 : 5.4e-4) * cycles + (pieces ? 0.002 : 0.154) * items);
  }
  return 26.6 + tiles * (0.95 * g.chunks + 0.0181 * policy.tile_n +
                         (ring ? 8.1e-4 : 4.8e-4) * cycles + (pieces ? 0.021 : 0.25) * items);
}

/// From sizes, by several fits.
double estimate_fitted(const FusedConvProblem& problem, const ConvPolicy& policy,
                       const shift::Layout& layout, const DeviceProps& device) noexcept {
  const shift::Geometry& g = layout.g;
  double steps = 0.0;
  for (const int32_t count : layout.chunk_steps) steps += count;
  const bool two = policy.planes == 2;
  const double n = policy.tile_n;
  // Of one tile: cycles of the tensor cores, items of the busiest producer warp, values stored and
  // promoted.
  const double cycles = 2.0 * steps * (two ? 3.0 : 1.0) * std::max(n / 2.0, 32.0);
  const More more = more_of(problem, g);
  const double items = double(layout.busiest_items) * (1.0 + more.items) * strided(problem);
  const double stored = g.tile_blocks * n * g.weight_rows / 16.0 * ((g.warp_channels + 7) / 8);
  const double more_stored = 4e-4 * stored * more.stored;
  const bool few = n * policy.planes <= 128;  // accumulators
  const int32_t walk = layout.walk(device.sm_count, true);
  const auto walks = double(layout.walks(walk));
  const double passes = problem.tail == Tail::kBatchNormTrain ? 2.0 : 1.0;
  const double tiles = passes * std::ceil(walks / device.sm_count) * walk;
  const bool grouped = problem.conv.groups > 1;
  if (problem.channels_last && problem.conv.dtype == DType::kFloat32 && !grouped &&
      problem.conv.channels % 4 == 0 && g.made.phases() == 1) {
    return estimate_last(g, policy, double(layout.busiest_items), cycles, tiles);
  }
  // Pixels of channels_last whose channels leave in smaller pieces.
  const bool pieces = problem.channels_last && (grouped || problem.conv.out_channels % 4 != 0);
  const double ragged = pieces ? 1.1 : 1.0;
  if (two && !shift::in_parts(policy.tile_n, policy.planes) &&
      layout.steps_at_once == shift::kSlabSteps) {
    // From 1,039 launches of 32 problems on an H100; what it chooses takes 1.02 of the shortest.
    const double tile = 1.27 * g.chunks + (few ? 1.03e-3 : 5e-4) * cycles + 0.345 * items +
                        8.1e-4 * stored + more_stored;
    const double stacked = g.stack > 1 ? 0.85 : 1.0;  // of the transposed founding problem
    // What 970 others took with packing, by graph replay (H100).
    return (grouped ? 20.0 : 15.0) + tiles * tile * stacked * ragged;
  }
  // Coefficients: least squares over 404 launches of 27 problems on an H200, median error 12 %.
  const double promoted = two ? 2.0 * n * steps / layout.steps_at_once : 0.0;
  const double tile = 1.0 * g.chunks + (8.4e-4 + (few ? 5.3e-4 : 0.0)) * cycles + 0.313 * items +
                      4e-4 * stored + more_stored + 1.5e-3 * promoted;
  // What the sum does not say: long tiles overlap more, and weights that come through a ring, or
  // little of x on its way, keep one plane's products waiting.
  double factor = n == 256 && weights_stay(g) ? 0.85 : 1.0;
  if (!stores_ahead(layout)) factor *= 1.05;
  if (!two && !weights_stay(g)) factor *= 1.1;
  if (!two && !reads_ahead(policy, layout)) factor *= 1.05;
  // What 910 others took instead, packing included, by graph replay (H100); five of 32 groups and
  // more took 1.29 to 1.48 of that, two of them 1.32 and 1.51 on an H200.
  const double of_groups = problem.conv.groups < 32 ? 0.9 : 1.2;
  const double others = grouped ? of_groups : problem.channels_last ? 1.15 : 0.98;
  const double time = (grouped ? 18.0 : 13.0) + tiles * tile * factor * others * ragged;
  const bool plain = !two && !grouped && !problem.channels_last &&
                     problem.conv.dtype == DType::kFloat32 && g.made.phases() == 1;
  if (!plain) return time;
  // With the older fit as well the founding transposed convolution takes 0.94 of what it would.
  return std::max(0.88 * time,
                  estimate_plain(problem, layout, policy.tile_n, cycles, stored, passes, tiles));
}

}  // namespace

bool suits(const ConvPolicy& policy, const ConvProblem& problem) noexcept {
  return policy.planes == planes_of(problem) && policy.element == kElement;
}

const shift::Instance* find_instance(const ConvPolicy& policy, shift::Role role) noexcept {
  int32_t count = 0;
  const shift::Instance* all = shift::instances(&count);
  const shift::Instance* found = std::find_if(all, all + count, [&](const auto& instance) {
    return instance.element == policy.element && instance.tile_n == policy.tile_n &&
           instance.planes == policy.planes && instance.role == role;
  });
  return found == all + count ? nullptr : found;
}

double estimate(const FusedConvProblem& problem, const ConvPolicy& policy,
                const shift::Layout& layout, const DeviceProps& device) noexcept {
  const double time = estimate_fitted(problem, policy, layout, device);
  const shift::Geometry& g = layout.g;
  // Strips of tiles of 128 pixels have become faster than those that were fitted: 19 launches of 10
  // problems took 0.62 to 1.04 of that, their median 0.78 (H200).
  const bool faster = policy.tile_n == 128 && policy.strip != 0 && g.piece_rows > 0 &&
                      g.chunks == 1 && !problem.channels_last;
  return faster ? (policy.planes == 2 ? 0.95 : 0.85) * time : time;
}

Status select_policy(const FusedConvProblem& problem, const DeviceProps& device, ConvPolicy* policy,
                     shift::Layout* layout) {
  const ConvProblem p = as_convolution(problem.conv);
  const int32_t planes = planes_of(p);
  double best = INFINITY;
  Status reason = error(Code::kNotSupported, "no convolution kernel multiplies %s",
                        to_string(problem.conv).c_str());
  int32_t count = 0;
  const shift::Instance* all = shift::instances(&count);
  for (int32_t i = 0; i < count; ++i) {
    const bool suits = all[i].planes == planes && all[i].element == kElement;
    if (!suits || all[i].role != shift::Role::kStore) continue;
    for (const int32_t strip : strips_of(p, all[i].tile_n)) {
      for (const int32_t m_blocks : {1, 2}) {
        for (const int32_t chunk : {0, 64, 32, 16}) {
          for (const int32_t stages : {3, 2}) {
            const ConvPolicy candidate{all[i].tile_n, planes, kElement, m_blocks,
                                       strip,         chunk,  stages,   {}};
            shift::Layout found;
            const Status status = shift::lay_out(problem.conv, candidate, device, &found);
            // A third patch takes room from what is on its way: 63 strips took 0.94 to 1.71 of the
            // time with two, their median 1.05 (H200).
            if (stages == 3 && strip != 0 && status.ok() && found.g.chunks == 1) continue;
            if (!status.ok()) {
              if (best == INFINITY) reason = status;
              continue;
            }
            const double time = estimate(problem, candidate, found, device);
            // Then fewer stages are no better.
            const bool enough =
                weights_stay(found.g) && reads_ahead(candidate, found) && stores_ahead(found);
            if (time < best) {
              best = time;
              *policy = candidate;
              *layout = std::move(found);
            }
            if (enough) break;
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
         a.stages == b.stages && a.gemm == b.gemm && a.direct == b.direct && a.patch_n == b.patch_n;
}

std::string to_string(Direct kernel) {
  if (kernel == Direct::kNone) return "Direct::kNone";
  if (kernel == Direct::kSelected) return "Direct::kSelected";
  if (kernel == Direct::kAny) return "Direct::kAny";
  const std::string taps = std::to_string(static_cast<int32_t>(kernel));
  return "Direct::k" + taps + "x" + taps;
}

std::string to_string(const ConvPolicy& policy) {
  char text[128];
  const char* element = policy.element == DType::kFloat32   ? "kFloat32"
                        : policy.element == DType::kFloat16 ? "kFloat16"
                                                            : "kBFloat16";
  std::snprintf(text, sizeof(text), "ConvPolicy{%d, %d, DType::%s, %d, %d, %d, %d", policy.tile_n,
                policy.planes, element, policy.m_blocks, policy.strip, policy.chunk, policy.stages);
  if (policy.direct != Direct::kNone) return text + (", {}, " + to_string(policy.direct)) + "}";
  if (policy.tile_n != 0) return std::string(text) + "}";
  const std::string gemm = text + (", " + to_string(policy.gemm));
  if (policy.patch_n == 0) return gemm + "}";
  return gemm + ", Direct::kNone, " + std::to_string(policy.patch_n) + "}";
}

int32_t compiled_policies(ConvPolicy* policies, int32_t capacity) noexcept {
  int32_t count = 0;
  const conv::shift::Instance* all = conv::shift::instances(&count);
  int32_t found = 0;
  for (int32_t i = 0; i < count; ++i) {
    if (all[i].role != conv::shift::Role::kStore) continue;
    if (found < capacity) {
      policies[found] = ConvPolicy{};
      policies[found].tile_n = all[i].tile_n;
      policies[found].planes = all[i].planes;
      policies[found].element = all[i].element;
    }
    ++found;
  }
  int32_t gemms = 0;
  const gemm::Instance* gathers = gemm::instances(&gemms);
  for (int32_t i = 0; i < gemms; ++i) {
    if (gathers[i].source == Source::kMatrix || gathers[i].source == Source::kTurned) continue;
    if (found < capacity) {
      policies[found] = ConvPolicy{};
      policies[found].planes = gathers[i].promote_k > 0 ? 2 : 1;
      policies[found].element = gathers[i].element;
      policies[found].gemm = gemm::policy_of(gathers[i]);
    }
    ++found;
  }
  int32_t of_patches = 0;
  const conv::patches::Instance* patches = conv::patches::instances(&of_patches);
  for (int32_t i = 0; i < of_patches; ++i) {
    if (found < capacity) {
      policies[found] = ConvPolicy{};
      policies[found].planes = patches[i].planes;
      policies[found].gemm.source = Source::kNchw;
      policies[found].patch_n = patches[i].columns;
    }
    ++found;
  }
  for (const Direct kernel : {Direct::kAny, Direct::k3x3, Direct::k5x5, Direct::k7x7}) {
    if (found < capacity) {
      policies[found] = ConvPolicy{};
      policies[found].direct = kernel;
    }
    ++found;
  }
  return found;
}

}  // namespace cutfuse
