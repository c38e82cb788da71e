/// \file
#include "conv/shift/reading.h"

#include <algorithm>

namespace cutfuse::conv::shift {
namespace {

constexpr int32_t kMaxBox = 256;           // elements of a box along a dimension
constexpr int32_t kMoreRounds = 8;         // that walk() compares
constexpr int32_t kBytesAhead = 16 << 10;  // of x, on their way to a multiprocessor; half at ieee

/// Pixels of the grid from a tile to the next.
int64_t advance_of(const Geometry& g) {
  const int64_t pixels = g.strip != 0
                             ? int64_t(tile_rows(g)) * g.pitch
                             : int64_t(g.tile_blocks) * g.block_outputs * g.pitch / g.out_width;
  return std::clamp<int64_t>(pixels, 1, g.patch);
}

}  // namespace

bool rolls(const Geometry& g) {
  const double in = double(g.batch) * g.channels * g.height * g.width;
  const double out = double(g.batch) * g.out_channels * g.out_height * g.out_width;
  const double twice = in * (double(g.patch) / double(advance_of(g)) - 1.0);
  return g.chunks == 1 && g.tiles > 1 && twice > 0.2 * (in + out);
}

void set_pitch(bool by_pieces, int32_t columns, Geometry* g) {
  constexpr int32_t kVector = 4;  // floats of 16 bytes
  g->pitch = round_up(columns + g->reach_columns, 2);
  g->piece_rows = 0;
  const int32_t early = ((-g->pad_w) % kVector + kVector) % kVector;
  const int32_t pitch = round_up(columns + g->reach_columns + ceil_div(early, g->stride_w),
                                 g->stride_w % 2 == 0 ? 2 : kVector);
  const int32_t phases = g->phases_h * g->phases_w;
  const bool few = g->phase_channels == 0;
  if (!by_pieces || g->width % kVector != 0 || pitch * g->stride_w > kMaxBox ||
      (pitch - g->pitch) * 16 > g->pitch || (g->chunks > 1 && phases > 1) ||
      (few && g->channels > 4 * kLanes)) {
    return;
  }
  g->pitch = pitch;
  g->early = early;
  g->piece_rows = 1;
  g->piece_channels = few ? g->channels : kLanes;
}

int32_t bytes_of_piece(const Geometry& g, int64_t rows) {
  const int64_t guard = g.early > 0 ? kPieceGuard : 0;
  return round_up(rows * 4 * g.pitch * g.stride_w * g.phases_h * g.piece_channels + guard, 128);
}

/// Of one plane, pieces have more than an item of 32 pixels of a group for each of the `warps` that
/// convert them: half as large they were 4 % slower (H200, the transposed founding problem).
void set_pieces(int64_t room, int32_t warps, int32_t planes, Geometry* g) {
  if (g->piece_rows == 0) return;
  const int32_t whole = g->strip == 0 ? 1 : 0;  // rows that begin and end within a patch
  const int64_t rows = ceil_div(rolls(*g) ? advance_of(*g) : int64_t(g->patch), g->pitch) + whole;
  for (int64_t divided = 1; divided <= rows; ++divided) {
    g->piece_rows = g->stride_h > 1 ? 1 : static_cast<int32_t>(ceil_div(rows, divided));
    g->piece_bytes = bytes_of_piece(*g, g->piece_rows);
    g->pieces = static_cast<int32_t>(std::min<int64_t>(room / g->piece_bytes, kMaxPieces));
    const int64_t items = ceil_div(int64_t(g->piece_rows) * g->pitch, 32) * groups_of_piece(*g);
    if (planes == 1 && 4 * items < 5 * warps) break;
    const bool ahead =
        g->pieces >= kFewestPieces && (g->pieces - 1) * g->piece_bytes * planes >= kBytesAhead;
    if (ahead && g->piece_rows <= kMaxBox) return;
  }
  g->piece_rows = 0;
}

void share_out(const ConvPolicy& policy, Layout* layout) {
  Geometry& g = layout->g;
  const int32_t warps = producers(policy.tile_n, policy.planes) / 32;
  const int64_t pixels = rolls(g) ? advance_of(g) : g.patch;
  layout->busiest_items = INT64_MAX;
  for (int32_t group_warps = 1; group_warps <= std::min(warps, g.chunk_groups); group_warps *= 2) {
    const int64_t items = ceil_div(ceil_div(pixels, 32), warps / group_warps) *
                          ceil_div(g.chunk_groups, group_warps) * g.chunks;
    if (items < layout->busiest_items) {
      layout->busiest_items = items;
      g.group_warps = group_warps;
    }
  }
  g.together = g.chunk_groups > g.group_warps ? 2 : 1;
}

int64_t Layout::walks(int32_t walk) const {
  return g.strips * ceil_div(tile_count / g.strips, walk);
}

int32_t Layout::walk(int32_t sm_count, bool stores) const {
  if (g.chunks == 1 && stores && !rolls(g)) return 1;
  // The longest, of few rounds, whose last round is nearly full; a strip's overlap is read again at
  // each start.
  const int64_t of_strip = tile_count / g.strips;
  int32_t best = 1;
  int64_t least = INT64_MAX;
  for (int64_t rounds = 1, more = kMoreRounds; more > 0; ++rounds) {
    const int64_t at_once = std::max<int64_t>(rounds * sm_count / g.strips, 1);
    const auto walk = static_cast<int32_t>(ceil_div(of_strip, at_once));
    if (walk > std::max(2 * g.tiles, 1)) continue;
    const int64_t busiest = (walk + 1) * ceil_div(walks(walk), sm_count);
    if (busiest < least) best = walk;
    least = std::min(least, busiest);
    --more;
  }
  return best;
}

}  // namespace cutfuse::conv::shift
