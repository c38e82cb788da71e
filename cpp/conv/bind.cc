/// \file
#include "conv/bind.h"

#include <algorithm>

#include "conv/problem.h"
#include "core/driver.h"
#include "core/status.h"

namespace cutfuse::conv {
namespace {

/// Has the copy engine bring x where its strides allow it.
Status bind_pieces(shift::Params* params) noexcept {
  const shift::Geometry& g = params->g;
  if (g.piece_rows == 0) return {};
  TensorBoxes boxes;
  boxes.data = params->x;
  boxes.sizes = {g.width, g.height, g.channels, g.groups, g.batch};
  boxes.strides = {params->x_column, params->x_row, params->x_channel,
                   g.channels * params->x_channel, params->x_image};
  boxes.box = {g.pitch * g.stride_w, g.piece_rows * g.phases_h, g.piece_channels, 1, 1};
  if (params->channels_together) {
    const auto channels_first = [](auto* of) {
      std::rotate(of->begin(), of->begin() + 2, of->begin() + 3);
    };
    channels_first(&boxes.sizes);
    channels_first(&boxes.strides);
    channels_first(&boxes.box);
    boxes.swizzled = true;
  }
  params->in_pieces = can_encode(boxes);
  if (!params->in_pieces) return {};
  params->piece_groups = shift::Divisor(shift::groups_of_piece(g));
  // Lanes next to each other, of column phases, are one load.
  const auto together = [&](int32_t count) {
    return g.phase_channels == 0 && g.phases_w % count == 0 && g.stride_w % count == 0 &&
           g.early % count == 0;
  };
  params->lanes_together = together(4) ? 4 : together(2) ? 2 : 1;
  return encode_boxes(boxes, &params->map);
}

}  // namespace

Status bind(const FusedConvProblem& problem, const ConvPolicy& policy, const shift::Layout& layout,
            const ConvBuffers& buffers, const PackedWeight& packed,
            shift::Params* params) noexcept {
  const shift::Geometry& g = layout.g;
  params->g = g;
  params->shared = layout.shared;
  params->pitch = shift::Divisor(g.pitch);
  params->out_width = shift::Divisor(g.out_width);
  params->m_tiles = shift::Divisor(g.m_tiles);
  params->strips = shift::Divisor(g.strips);
  params->tiles_of_outer = shift::Divisor(g.batch * g.tiles);
  params->tiles_of_image = shift::Divisor(g.tiles);
  params->tiles_of_strip = static_cast<int32_t>(layout.tile_count / g.strips);
  // One warpgroup stores while the other multiplies (H200: 5 steps of 16 -4 to -13 % of time, 27 -3
  // to -5 %, 18 without stacked rows +1 to +3 %; 27 with one warpgroup of producers +2 %). A turn
  // that ends before what is done meanwhile took 3 % less where there is much of that (27 steps of
  // rows that are not strips; 5 steps 6 % more). Slabs that come through a ring are read by both at
  // once. At ieee one promotes meanwhile, which takes 2 to 10 % less time; where tiles are promoted
  // in parts they take turns by tiles (7 %).
  const bool few = layout.padded_steps() <= 8;
  const bool wide = shift::producers(policy.tile_n, policy.planes) > 128;
  if (policy.planes == 2 && !shift::in_parts(policy.tile_n, policy.planes)) {
    params->turns = shift::Turns::kOfSums;
  } else if (shift::weights_stay(g) && (few || wide)) {
    const bool of_issues = policy.planes == 1 && !few && g.strip == 0;
    params->turns = of_issues ? shift::Turns::kOfIssues : shift::Turns::kOfTiles;
  }
  params->x = buffers.x.data;
  params->x_image = buffers.x.strides[0];
  params->x_channel = buffers.x.strides[1];
  params->x_row = buffers.x.strides[2];
  params->x_column = buffers.x.strides[3];
  params->dtype = problem.conv.dtype;
  const int64_t size = size_of(problem.conv.dtype);
  const int64_t reach = (g.channels - 1) * params->x_channel + (g.height - 1) * params->x_row +
                        (g.width - 1) * params->x_column;
  CUTFUSE_CHECK(reach < (int64_t(1) << 30), Code::kNotSupported,
                "an image of x spans %lld elements; make x contiguous, so that it spans fewer than "
                "2^30",
                static_cast<long long>(reach));
  params->channel_bytes = static_cast<uint32_t>(params->x_channel * size);
  params->row_bytes = static_cast<uint32_t>(params->x_row * size);
  params->column_bytes = static_cast<uint32_t>(params->x_column * size);
  const int32_t phases = g.phases_h * g.phases_w;
  params->phase_masks =
      g.phase_channels == 0 && !g.rows_first && phases <= 32 && (phases & (phases - 1)) == 0;
  params->last_phase = phases > shift::kLanes ? phases - 1 : 0;
  const bool even = g.phase_channels == 0 && g.phases_w % 2 == 0 && g.pad_w % 2 == 0 &&
                    g.stride_w % 2 == 0 && g.width % 2 == 0 && params->x_column == 1 &&
                    params->x_row % 2 == 0 && params->x_channel % 2 == 0 &&
                    params->x_image % 2 == 0 &&
                    reinterpret_cast<uintptr_t>(buffers.x.data) % 8 == 0;
  params->lane_pairs = even && problem.conv.dtype == DType::kFloat32;
  params->weight = view_weight(problem.conv, buffers.weight);
  params->packed = packed.tiles;
  params->exponents = packed.exponents;
  params->out = buffers.out;
  params->channels_last = problem.channels_last;
  params->in_runs = !problem.channels_last && g.made.phases() == 1 && size == 4;
  const int64_t together = 16 / size;
  params->channels_together =
      !params->in_runs && g.phase_channels != 0 && g.channels % together == 0 &&
      params->x_channel == 1 && params->x_column % together == 0 && params->x_row % together == 0 &&
      params->x_image % together == 0 && reinterpret_cast<uintptr_t>(buffers.x.data) % 16 == 0;
  params->one_phase = phases == 1 && !params->channels_together;
  params->lanes_are_channels = g.phase_channels != 0 && !params->channels_together;
  params->phases_made = shift::Divisor(g.made.phases());
  const auto address = reinterpret_cast<uintptr_t>(buffers.out);
  params->out_phase = params->in_runs ? static_cast<int32_t>(address / 4 % shift::kSector) : 0;
  params->pairs = params->out_phase % 2 == 0 && g.out_width % 2 == 0;
  params->promotion = buffers.promotion;
  params->promotion2 = 2.f * buffers.promotion - 1.f;
  params->steps_at_once = layout.steps_at_once;
  std::copy(layout.chunk_slab.begin(), layout.chunk_slab.end(), params->chunk_slab);
  std::copy(layout.chunk_steps.begin(), layout.chunk_steps.end(), params->chunk_steps);
  std::copy(layout.steps.begin(), layout.steps.end(), params->steps);
  return bind_pieces(params);
}

}  // namespace cutfuse::conv
