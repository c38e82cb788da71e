/// \file
/// ConvProblem x ConvPolicy -> geometry, table of steps and shared memory of the shift kernel.
#pragma once

#include <vector>

#include "conv/shift/params.h"
#include "cutfuse/conv.h"
#include "cutfuse/device.h"
#include "cutfuse/status.h"

namespace cutfuse::conv::shift {

/// What a policy makes of a problem; a plain value.
struct Layout {
  Geometry g = {};
  SharedLayout shared;
  std::vector<Half> halves;     // two of each step, slabs padded
  std::vector<uint32_t> steps;  // as in Params
  int32_t padded_steps() const { return static_cast<int32_t>(halves.size() / 2); }
  std::vector<int32_t> chunk_slab, chunk_steps;
  int64_t tile_count = 0;
  /// Items of 32 pixels of eight lane-channels that the busiest producer warp has of a tile.
  int64_t busiest_items = 0;

  /// Tiles that a block takes one after the other: as many as leave the blocks equal work, or one.
  int32_t walk(int32_t sm_count, bool stores) const;
  /// How many such walks there are.
  int64_t walks(int32_t walk) const;
  /// Steps that are promoted together at ieee: fewer than a slab has, and with the fourth product,
  /// where sums are so short that single truncations show.
  int32_t steps_at_once = 0;
  bool four_products() const { return steps_at_once <= 2; }
  int64_t outer() const { return int64_t(g.groups) * g.m_tiles; }
};

/// kNotSupported, in words, if the kernel cannot run the problem so.
Status lay_out(const ConvProblem& problem, const ConvPolicy& policy, const DeviceProps& device,
               Layout* layout);

}  // namespace cutfuse::conv::shift
