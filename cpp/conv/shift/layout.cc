/// \file
#include "conv/shift/layout.h"

#include <algorithm>

#include "conv/problem.h"
#include "conv/shift/reading.h"
#include "conv/shift/steps.h"
#include "core/checked_math.h"
#include "core/status.h"

namespace cutfuse::conv::shift {
namespace {

constexpr int64_t kMaxExtent = int64_t(1) << 30;
constexpr int32_t kMaxRing = 64;   // slabs that Control has barriers for
constexpr int32_t kMaxStages = 4;  // patches that it has them for

void set_problem(const ConvProblem& p, Geometry* g) {
  const auto narrow = [](int64_t value) { return static_cast<int32_t>(value); };
  g->batch = narrow(p.batch);
  g->groups = narrow(p.groups);
  g->channels = narrow(p.channels / p.groups);
  g->height = narrow(p.height);
  g->width = narrow(p.width);
  g->out_channels = narrow(p.out_channels / p.groups);
  g->out_height = narrow(p.out_height);
  g->out_width = narrow(p.out_width);
  g->kernel_h = narrow(p.kernel_h);
  g->kernel_w = narrow(p.kernel_w);
  g->stride_h = narrow(p.stride_h);
  g->stride_w = narrow(p.stride_w);
  g->pad_h = narrow(p.pad_h);
  g->pad_w = narrow(p.pad_w);
  g->dilation_h = narrow(p.dilation_h);
  g->dilation_w = narrow(p.dilation_w);
}

/// Phases that a filter has taps in: 0 .. count - 1.
int32_t count_phases(int32_t kernel, int32_t stride, int32_t dilation) {
  int32_t last = 0;
  for (int32_t r = 0; r < kernel; ++r) last = std::max(last, r * dilation % stride);
  return last + 1;
}

void set_channels(const ConvPolicy& policy, Geometry* g) {
  g->phases_h = count_phases(g->kernel_h, g->stride_h, g->dilation_h);
  g->phases_w = count_phases(g->kernel_w, g->stride_w, g->dilation_w);
  const int32_t phases = g->phases_h * g->phases_w;
  // Few channels would leave lanes empty in every phase; many let phases without a tap be skipped.
  g->phase_channels = phases == 1 || g->channels >= kLanes ? round_up(g->channels, kLanes) : 0;
  g->lane_groups = g->phase_channels != 0
                       ? phases * g->phase_channels / kLanes
                       : static_cast<int32_t>(ceil_div(g->channels * phases, kLanes));
  g->chunk_groups =
      policy.chunk == 0 ? g->lane_groups : std::min(policy.chunk / kLanes, g->lane_groups);
  g->chunks = static_cast<int32_t>(ceil_div(g->lane_groups, g->chunk_groups));
  g->reach_rows = (g->kernel_h - 1) * g->dilation_h / g->stride_h;
  g->reach_columns = (g->kernel_w - 1) * g->dilation_w / g->stride_w;
}

/// Results of a block of whole rows: its pixels also span the row ends it crosses, and as many
/// results more as alignment to a sector and to an even column may ask for.
int32_t results_of_block(int32_t tile_n, const Geometry& g) {
  const int64_t plane = int64_t(g.out_height) * g.out_width;
  const auto span = [&](int64_t results) {
    const int64_t crossings = ceil_div(results - 1, g.out_width);
    return results + crossings * (g.pitch - g.out_width);
  };
  if (plane + (g.out_height - 1) * int64_t(g.pitch - g.out_width) <= tile_n) {
    return static_cast<int32_t>(plane);
  }
  int32_t results = tile_n;
  while (results > 0 && span(results + kSector) > tile_n) --results;
  // Where rows are even, statistics take pixels in pairs, and planes often begin on a sector.
  if (g.out_width % 2 != 0) return results;
  return results > 4 * kSector ? results / kSector * kSector : results / 2 * 2;
}

Status set_tiles(const ConvPolicy& policy, bool by_pieces, Layout* layout) noexcept {
  Geometry* g = &layout->g;
  g->m_blocks = policy.m_blocks;
  g->tile_blocks = 2 / policy.m_blocks;
  const int64_t m_rows = int64_t(64) * policy.m_blocks;
  g->m_tiles = static_cast<int32_t>(ceil_div(g->out_channels, m_rows));
  // Whole boxes of eight; then the last warps, and rows of the weights, may be left over.
  const int64_t warps = 4 * policy.m_blocks / g->stack;
  g->row_warps = warps == 8 ? 3 : warps == 4 ? 2 : warps == 2 ? 1 : 0;
  g->warp_channels = round_up(ceil_div(g->out_channels, g->m_tiles * warps), 8);
  g->weight_rows = g->stack > 1 ? 64
                                : 16 * static_cast<int32_t>(std::min<int64_t>(
                                           warps, ceil_div(g->out_channels, g->warp_channels)));
  int64_t span = 0;  // pixels from a tile's first to its last block
  if (policy.strip != 0) {
    g->strip = policy.strip;
    g->strips = static_cast<int32_t>(ceil_div(g->out_width, policy.strip));
    CUTFUSE_CHECK(policy.strip % kSector == 0 && policy.strip <= policy.tile_n - kSector,
                  Code::kNotSupported, "a strip of %d columns and alignment exceed %d pixels",
                  policy.strip, policy.tile_n);
    // A block's last pixels, beyond the strip's, are of the next row.
    set_pitch(by_pieces, policy.strip + kSector, g);
    g->block_outputs = policy.strip;
    g->blocks = static_cast<int32_t>(ceil_div(g->out_height, g->stack));
    span = int64_t(g->tile_blocks - 1) * g->stack * g->pitch;
  } else {
    g->strips = 1;
    set_pitch(by_pieces, g->out_width, g);
    g->block_outputs = results_of_block(policy.tile_n, *g);
    CUTFUSE_CHECK(g->block_outputs > 0 && g->pitch >= kLanes, Code::kNotSupported,
                  "rows of %d pixels do not suit blocks of %d", g->out_width, policy.tile_n);
    const int64_t plane = int64_t(g->out_height) * g->out_width;
    g->blocks = static_cast<int32_t>(ceil_div(plane, g->block_outputs));
    const int64_t crossings = ceil_div(g->block_outputs, g->out_width);
    span = (g->tile_blocks - 1) * (g->block_outputs + 1 + crossings * (g->pitch - g->out_width));
  }
  CUTFUSE_CHECK(int64_t(g->out_height) * g->pitch < kMaxExtent, Code::kNotSupported,
                "%d rows of %d pixels with padding; a kernel numbers fewer than 2^30",
                g->out_height, g->pitch);
  g->tiles = static_cast<int32_t>(ceil_div(g->blocks, g->tile_blocks));
  // What instructions read; of a strip, what they read beyond its last row is of no result.
  const int64_t read =
      span + policy.tile_n + int64_t(g->reach_rows + g->stack - 1) * g->pitch + g->reach_columns;
  const int64_t rows = int64_t(tile_rows(*g)) + g->reach_rows;
  const int64_t patch = g->strip != 0 ? rows * g->pitch : read;
  CUTFUSE_CHECK(std::max(patch, read) * 16 < kReach, Code::kNotSupported,
                "a patch of %lld pixels does not fit in shared memory",
                static_cast<long long>(patch));
  g->patch = static_cast<int32_t>(patch);
  layout->shared.group_bytes = static_cast<int32_t>(std::max(patch, read) * 16);
  return {};
}

/// In parts, the small products leave no error in the sums that are promoted.
void set_promotion(const ConvPolicy& policy, Layout* layout) noexcept {
  const Geometry& g = layout->g;
  const int64_t terms = g.channels * g.made.fewest_taps();
  const int32_t few = in_parts(policy.tile_n, policy.planes) ? 3 : 2;
  layout->steps_at_once = terms < 64 ? 1 : terms < 128 ? few : kSlabSteps;
}

Status set_shared(const ConvPolicy& policy, const DeviceProps& device, Layout* layout) noexcept {
  Geometry& g = layout->g;
  SharedLayout& s = layout->shared;
  int64_t size = 0;
  const auto take = [&](int64_t bytes, int32_t alignment) {
    size = ceil_div(size, alignment) * alignment;
    const auto at = static_cast<int32_t>(size);
    size += bytes;
    return at;
  };
  g.stages = policy.stages;
  const int32_t patch_bytes = policy.planes * s.plane_bytes;
  s.stage_bytes = g.ring_rows > 0 ? 0 : patch_bytes;
  const int32_t step_bytes = policy.planes * g.weight_rows * kRowStepBytes;
  s.slab_bytes = kSlabSteps * step_bytes;
  s.last_slab_bytes = ((layout->chunk_steps.back() - 1) % kSlabSteps + 1) * step_bytes;
  const int64_t all_slabs = int64_t(g.slabs - 1) * s.slab_bytes + s.last_slab_bytes;
  s.patch = take(int64_t(g.ring_rows > 0 ? 1 : g.stages) * patch_bytes, 128);
  s.rows = take(int64_t(g.weight_rows) * kRowBytes, 16);
  s.lanes = take(int64_t(g.lane_groups) * kLanes * kLaneBytes, 16);
  s.sends = take(kSendBytes, 16);
  s.control = take(kControlBytes, 16);
  // Two boxes of staging for each warp let stores of one overlap writing the other, and more of x
  // is on its way, if the weights still fit.
  const int32_t threads = producers(policy.tile_n, policy.planes);
  const int64_t box_bytes =
      int64_t(g.tile_blocks) * g.weight_rows / 16 * 8 * (policy.tile_n + kSector) * 4;
  // The instruction reads 64 rows, so beyond the last step's; compute-sanitizer takes them for 2
  // KiB in one piece.
  const int64_t beyond = std::max<int64_t>(
      {int64_t(g.m_blocks * 64 - g.weight_rows) * 16,
       2048 + int64_t(g.m_blocks - 1) * 1024 - int64_t(g.weight_rows) * kRowStepBytes, 0});
  const int64_t pieces = g.piece_rows > 0 ? kFewestPieces * int64_t(bytes_of_piece(g, 1)) : 0;
  int64_t raw = 0;
  const int64_t before = size;
  const auto spend = [&](int32_t boxes, int32_t depth, int64_t more = 0) {
    size = before;
    s.staging_boxes = boxes;
    g.raw_depth = depth;
    raw = std::max(int64_t(depth) * g.together * (threads / 32) * kRawItemBytes, pieces) + more;
    s.raw = take(raw, 128);
    s.staging = take(boxes * box_bytes, 128);
    s.weights = take(0, 128);
    const int64_t left = device.shared_bytes - size - beyond;
    const bool all = left >= all_slabs && g.slabs <= kMaxRing;
    g.slab_ring =
        all ? g.slabs
            : static_cast<int32_t>(std::min<int64_t>({left / s.slab_bytes, g.slabs - 1, kMaxRing}));
    return all;
  };
  const bool stay = (g.warp_channels > 8 && (spend(2, kMostAhead) || spend(2, 5) || spend(2, 4))) ||
                    spend(1, kMostAhead) || spend(1, 4) || spend(1, 3) || spend(1, 2) ||
                    spend(1, 1);
  if (!stay) {
    for (const int32_t depth : {4, 2, 1}) {
      spend(1, depth);
      if (g.slab_ring >= 3) break;
    }
  }
  const int32_t least = in_parts(policy.tile_n, policy.planes) ? g.slabs : std::min(g.slabs, 3);
  CUTFUSE_CHECK(g.slab_ring >= least, Code::kNotSupported,
                "%lld bytes of shared memory are too few for %d patches of %d bytes and weights",
                static_cast<long long>(device.shared_bytes), g.ring_rows > 0 ? 1 : g.stages,
                patch_bytes);
  if (stay && g.piece_rows > 0) {  // pieces take what is left
    spend(s.staging_boxes, g.raw_depth, (device.shared_bytes - size - beyond - all_slabs) & ~127);
  }
  set_pieces(raw, threads / 32 - 1, policy.planes, &g);
  s.total = static_cast<int32_t>(s.weights +
                                 (stay ? all_slabs : int64_t(g.slab_ring) * s.slab_bytes) + beyond);
  return {};
}

/// Tiles, to which blocks add how many they skip, and rows of packed weights have 32-bit numbers.
Status count_tiles(Layout* layout) noexcept {
  const Geometry& g = layout->g;
  const int64_t outer = layout->outer();
  CUTFUSE_CHECK(outer * g.weight_rows < kMaxExtent, Code::kNotSupported,
                "%d groups of %d tiles of output channels have 2^30 rows of weights and more",
                g.groups, g.m_tiles);
  const bool fits =
      checked_multiply(outer * g.batch, int64_t(g.strips) * g.tiles, &layout->tile_count);
  CUTFUSE_CHECK(fits && layout->tile_count < kMaxExtent, Code::kNotSupported,
                "%d images of %d strips of %d tiles, %lld times: 2^30 tiles and more; split the "
                "batch",
                g.batch, g.strips, g.tiles, static_cast<long long>(outer));
  return {};
}

/// With so many rows stacked, x in pieces or not, and a ring of rows with more room or less.
Status lay_out_so(const ConvProblem& p, const Interleave& made, const ConvPolicy& policy,
                  const DeviceProps& device, int32_t stack, bool by_pieces, bool roomy,
                  Layout* layout) {
  for (const int64_t size :
       {p.batch, p.channels, p.height * p.width, p.out_channels, p.out_height * p.out_width}) {
    CUTFUSE_CHECK(size < kMaxExtent, Code::kNotSupported,
                  "%s: a size of 2^30 and more is PyTorch's", to_string(p).c_str());
  }
  CUTFUSE_CHECK(p.kernel_h * p.dilation_h < 128 && p.kernel_w * p.dilation_w < 128 &&
                    p.stride_h <= 16 && p.stride_w <= 16 && p.channels / p.groups < 16384 &&
                    p.height < 32768,
                Code::kNotSupported,
                "%s: filters reach at most 127 pixels, with strides up to 16, in images of fewer "
                "than 32768 rows",
                to_string(p).c_str());
  CUTFUSE_CHECK(p.out_height * p.stride_h < kMaxExtent && p.out_width * p.stride_w < kMaxExtent,
                Code::kNotSupported, "%s: results span 2^30 pixels and more, which is PyTorch's",
                to_string(p).c_str());
  const int64_t terms = p.channels / p.groups * p.kernel_h * p.kernel_w;
  CUTFUSE_CHECK(terms <= 16 * kMaxSteps, Code::kNotSupported,
                "%s: sums of %lld terms have more than %d steps of 16", to_string(p).c_str(),
                static_cast<long long>(terms), kMaxSteps);
  *layout = Layout{};
  Geometry& g = layout->g;
  set_problem(p, &g);
  g.made = made;
  g.stack = stack;
  set_channels(policy, &g);
  CUTFUSE_CHECK(g.chunks == 1 || (g.chunks <= kMaxChunks && takes_chunks(policy.tile_n)),
                Code::kNotSupported, "%d chunks of channels are too many for a tile of %d",
                g.chunks, policy.tile_n);
  if (Status status = set_tiles(policy, by_pieces, layout); !status.ok()) return status;
  const int64_t patch_bytes = int64_t(policy.planes) * g.chunk_groups * layout->shared.group_bytes;
  // Steps of what does not fit would take seconds to list.
  CUTFUSE_CHECK(patch_bytes < device.shared_bytes, Code::kNotSupported,
                "%lld bytes of shared memory are too few for a patch of %lld bytes and weights",
                static_cast<long long>(device.shared_bytes), static_cast<long long>(patch_bytes));
  if (Status status = count_tiles(layout); !status.ok()) return status;
  set_order(&g);
  set_ring(policy, roomy, layout);
  layout->shared.plane_bytes = g.chunk_groups * layout->shared.group_bytes;
  if (Status status = set_steps(layout); !status.ok()) return status;
  set_promotion(policy, layout);
  share_out(policy, layout);
  return set_shared(policy, device, layout);
}

/// Where blocks begin anew often, with a ring that has more room, if nothing else lacks it.
Status lay_out_rows(const ConvProblem& p, const Interleave& made, const ConvPolicy& policy,
                    const DeviceProps& device, int32_t stack, bool by_pieces, Layout* layout) {
  constexpr int32_t kLong = 32;  // tiles one below the other
  Status status = lay_out_so(p, made, policy, device, stack, by_pieces, false, layout);
  const Geometry& g = layout->g;
  if (!status.ok() || g.ring_rows == 0) return status;
  if (std::min(layout->walk(device.sm_count, true), g.tiles) >= kLong) return {};
  Layout roomy;
  if (!lay_out_so(p, made, policy, device, stack, by_pieces, true, &roomy).ok()) return {};
  const bool same = roomy.g.ring_rows > 0 && (roomy.g.piece_rows > 0) == (g.piece_rows > 0) &&
                    weights_stay(roomy.g) == weights_stay(g) &&
                    roomy.shared.staging_boxes == layout->shared.staging_boxes;
  if (same) *layout = std::move(roomy);
  return {};
}

Status lay_out_stacked(const ConvProblem& p, const Interleave& made, const ConvPolicy& policy,
                       const DeviceProps& device, int32_t stack, Layout* layout) {
  Status status = lay_out_rows(p, made, policy, device, stack, false, layout);
  if (!status.ok() || p.dtype != DType::kFloat32) return status;
  // Unless then the weights, which stayed, come through a ring.
  Layout pieces;
  if (lay_out_rows(p, made, policy, device, stack, true, &pieces).ok() && pieces.g.piece_rows > 0 &&
      (weights_stay(pieces.g) || !weights_stay(layout->g))) {
    *layout = std::move(pieces);
  }
  return {};
}

Status check_arguments(const ConvPolicy& policy) {
  CUTFUSE_CHECK(policy.m_blocks == 1 || policy.m_blocks == 2, Code::kNotSupported,
                "%s: m_blocks must be 1 or 2", to_string(policy).c_str());
  CUTFUSE_CHECK(policy.stages >= 2 && policy.stages <= kMaxStages, Code::kNotSupported,
                "%s: stages must be 2 to %d", to_string(policy).c_str(), kMaxStages);
  CUTFUSE_CHECK(policy.chunk >= 0 && policy.chunk % kLanes == 0 && policy.strip >= 0,
                Code::kNotSupported,
                "%s: chunk must be a multiple of %d and strip a width, or 0 for all",
                to_string(policy).c_str(), kLanes);
  return {};
}

}  // namespace

Status lay_out(const ConvProblem& problem, const ConvPolicy& policy, const DeviceProps& device,
               Layout* layout) {
  CUTFUSE_CHECK(problem.out_height * problem.out_width < kMaxExtent, Code::kNotSupported,
                "%s: a size of 2^30 and more is PyTorch's", to_string(problem).c_str());
  if (Status status = check_arguments(policy); !status.ok()) return status;
  const ConvProblem p = as_convolution(problem);
  const Interleave made = interleave_of(problem);
  const Status status = lay_out_stacked(p, made, policy, device, 1, layout);
  // Where few channels would leave rows of the instruction empty, it makes several rows of results,
  // unless x then no longer comes in pieces.
  if (policy.strip != 0 && policy.m_blocks == 1) {
    const bool by_pieces = status.ok() && layout->g.piece_rows > 0;
    for (int32_t stack = 4; stack > 1; stack /= 2) {
      if (p.out_channels / p.groups * stack > 64 || p.out_height < 2 * stack) continue;
      Layout stacked;
      if (!lay_out_stacked(p, made, policy, device, stack, &stacked).ok()) continue;
      if (by_pieces && stacked.g.piece_rows == 0) continue;
      *layout = std::move(stacked);
      return {};
    }
  }
  return status;
}

}  // namespace cutfuse::conv::shift
