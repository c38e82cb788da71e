/// \file
#include "conv/shift/steps.h"

#include <algorithm>

#include "conv/shift/reading.h"
#include "core/checked_math.h"
#include "core/status.h"

namespace cutfuse::conv::shift {
namespace {

/// Whether some lane of `group` has a weight at tap (a, b).
bool has_weight(const Geometry& g, int32_t group, int32_t a, int32_t b) {
  const auto has_row = [&](int32_t tap, int32_t phase) {
    for (int32_t row = 0; row < g.stack && row <= tap; ++row) {
      if (filter_index(tap - row, phase, g.stride_h, g.dilation_h, g.kernel_h) >= 0) return true;
    }
    return false;
  };
  for (int32_t lane = 0; lane < kLanes; ++lane) {
    const LaneChannel at = lane_channel(g, group * kLanes + lane);
    if (at.channel < g.channels && has_row(a, at.phase_h) &&
        filter_index(b, at.phase_w, g.stride_w, g.dilation_w, g.kernel_w) >= 0) {
      return true;
    }
  }
  return false;
}

/// Groups from `first` on at taps where they have a weight. Of a ring row by row, so that both
/// halves of a step lie in one.
std::vector<Half> halves_of(const Geometry& g, int32_t first, int32_t last) {
  std::vector<Half> halves;
  for (int32_t group = first; group < last; ++group) {
    for (int32_t a = 0; a < g.reach_rows + g.stack; ++a) {
      for (int32_t b = 0; b <= g.reach_columns; ++b) {
        if (has_weight(g, group, a, b)) {
          halves.push_back(
              {static_cast<int16_t>(group), static_cast<uint8_t>(a), static_cast<uint8_t>(b)});
        }
      }
    }
  }
  if (g.ring_rows > 0) {
    std::stable_sort(halves.begin(), halves.end(),
                     [](const Half& a, const Half& b) { return a.tap_h < b.tap_h; });
  }
  return halves;
}

/// With padding to whole slabs.
int32_t steps_of(size_t halves) {
  return round_up(ceil_div(static_cast<int64_t>(halves), 2), kSlabSteps);
}

}  // namespace

/// Lanes of phases that the last taps have no weight for may fill whole groups, which are left out:
/// 3 of 54 halves of the founding conv2d's. What reads x lane by lane knows one order by its bits.
void set_order(Geometry* g) {
  if (g->phase_channels != 0 || g->piece_rows == 0) return;
  Geometry other = *g;
  other.rows_first = true;
  g->rows_first =
      halves_of(other, 0, g->lane_groups).size() < halves_of(*g, 0, g->lane_groups).size();
}

void set_ring(const ConvPolicy& policy, bool roomy, Layout* layout) {
  Geometry g = layout->g;
  const bool suits = takes_rings(policy.tile_n) && policy.m_blocks == 1;
  if (!suits || g.strip == 0 || g.reach_rows == 0 || !rolls(g)) return;
  g.ring_rows = policy.stages * patch_rows(g);
  if (!roomy) g.ring_rows -= (policy.stages - 1) * (patch_rows(g) - tile_rows(g));
  const std::vector<Half> halves = halves_of(g, 0, g.lane_groups);
  for (size_t i = 1; i < halves.size(); i += 2) {
    if (halves[i].tap_h != halves[i - 1].tap_h) return;
  }
  // What instructions read beyond the last row is of no result.
  const int64_t pixels =
      int64_t(g.ring_rows - 1) * g.pitch + std::max(g.pitch, policy.tile_n + g.reach_columns);
  const bool fits = pixels * 16 < kReach &&
                    int64_t(steps_of(halves.size())) * (g.ring_rows / g.stack) <= kMaxSteps;
  if (!fits) return;
  layout->g.ring_rows = g.ring_rows;
  layout->shared.group_bytes = static_cast<int32_t>(pixels * 16);
}

Status set_steps(Layout* layout) {
  const Geometry& g = layout->g;
  const int32_t group_bytes = layout->shared.group_bytes;
  layout->chunk_slab.push_back(0);
  for (int32_t chunk = 0; chunk < g.chunks; ++chunk) {
    const int32_t first = chunk * g.chunk_groups;
    std::vector<Half> halves = halves_of(g, first, std::min(first + g.chunk_groups, g.lane_groups));
    const auto steps = static_cast<int32_t>(ceil_div(static_cast<int64_t>(halves.size()), 2));
    const int32_t padded = steps_of(halves.size());
    CUTFUSE_CHECK(steps > 0, Code::kNotSupported, "a chunk of %d channels has no tap",
                  g.chunk_groups * kLanes);
    CUTFUSE_CHECK(layout->steps.size() + padded <= kMaxSteps, Code::kNotSupported,
                  "%lld channels of a %dx%d filter have more than %d steps of 16",
                  static_cast<long long>(g.channels), g.kernel_h, g.kernel_w, kMaxSteps);
    halves.resize(2 * static_cast<size_t>(padded), Half{-1, 0, 0});
    const int32_t starts = g.ring_rows > 0 ? g.ring_rows / g.stack : 1;
    for (int32_t i = 0; i < starts * padded; ++i) {
      const auto offset = [&](const Half& half) {
        const int32_t down = i / padded * g.stack + half.tap_h;
        const int32_t row = g.ring_rows > 0 ? down % g.ring_rows : down;
        return (half.group - first) * group_bytes + (row * g.pitch + half.tap_w) * 16;
      };
      const Half& one = halves[2 * (i % padded)];
      const Half& other = halves[2 * (i % padded) + 1];
      const int32_t at = one.group >= 0 ? offset(one) : 0;
      const int32_t distance = other.group >= 0 ? offset(other) - at : 0;
      CUTFUSE_CHECK(at < kReach && distance < kReach, Code::kNotSupported,
                    "a chunk of %d channels does not fit in shared memory",
                    g.chunk_groups * kLanes);
      layout->steps.push_back(static_cast<uint32_t>(at >> 4) | static_cast<uint32_t>(distance >> 4)
                                                                   << 16);
    }
    layout->halves.insert(layout->halves.end(), halves.begin(), halves.end());
    layout->chunk_steps.push_back(steps);
    layout->chunk_slab.push_back(layout->chunk_slab.back() + padded / kSlabSteps);
  }
  layout->g.slabs = layout->chunk_slab.back();
  return {};
}

}  // namespace cutfuse::conv::shift
