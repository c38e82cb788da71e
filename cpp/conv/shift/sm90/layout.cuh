/// \file
/// Where things lie: tiles of the result, their blocks of pixels, and the pipeline's barriers.
#pragma once

#include "conv/shift/params.h"
#include "conv/shift/sm90/instructions.cuh"

namespace cutfuse::conv::shift::sm90 {

inline constexpr int kConsumers = 256;  // threads: two warpgroups that multiply and store
inline constexpr int kMaxStages = 4;
inline constexpr int kMaxTileBlocks = 2;
inline constexpr int kMaxRing = 64;  // slabs of weights in shared memory
inline constexpr int kConsumerWarps = kConsumers / 32;

// Named barriers.
inline constexpr uint32_t kProducerBarrier = 1;
inline constexpr uint32_t kConsumerBarrier = 2;
inline constexpr uint32_t kTurnBarrier = 3;  // and 4: of each consumer warpgroup
inline constexpr uint32_t kLastBarrier = 5;  // and 6: likewise

/// Where a ring of stages has got to: the stage and its barrier's phase.
struct Turn {
  int32_t stage = 0;
  uint32_t phase = 0;

  CUTLASS_DEVICE void next(int32_t stages) {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
  CUTLASS_DEVICE Turn previous(int32_t stages) const {
    return stage > 0 ? Turn{stage - 1, phase} : Turn{stages - 1, phase ^ 1};
  }
};

/// What a row of the weights' tile needs afterwards.
struct RowConstants {
  float scale;  // of the folded steps and the weight's exponent
  float shift;
  int32_t exponent;
  int32_t plain;  // whether scale and shift may be used
};

struct Tile {
  int32_t outer, image, strip, first;  // outer: (group, m tile); first: block
};

/// The tiles of this block: walks of tiles that follow each other in a strip, then others further
/// on. The walks of all strips are taken side by side, so that what strips share of x and of a line
/// of results is there at once: a plain copy of the transposed founding problem's took 357 us strip
/// after strip, 320 so (H200).
class Schedule {
 public:
  CUTLASS_DEVICE explicit Schedule(const Params& p) : walk_(int32_t(blockIdx.x)) { enter(p); }
  CUTLASS_DEVICE bool more(const Params& p) const { return walk_ < p.walks; }
  /// Whether the tile before this one is the one above it, or of the image before.
  CUTLASS_DEVICE bool continues() const { return step_ > 0; }
  CUTLASS_DEVICE void next(const Params& p) {
    ++index_;
    if (++step_ == p.walk || index_ == p.tiles_of_strip) {
      walk_ += int32_t(gridDim.x);
      enter(p);
    }
  }
  CUTLASS_DEVICE int32_t outer(const Params& p) const { return p.tiles_of_outer.divide(index_); }
  CUTLASS_DEVICE Tile tile(const Params& p) const {
    Tile tile;
    tile.strip = walk_ - p.strips.divide(walk_) * p.g.strips;
    tile.outer = outer(p);
    const int32_t of_outer = index_ - tile.outer * int32_t(p.tiles_of_outer.divisor);
    tile.image = p.tiles_of_image.divide(of_outer);
    tile.first = (of_outer - tile.image * int32_t(p.tiles_of_image.divisor)) * p.g.tile_blocks;
    return tile;
  }
  /// Tiles of this block in all.
  CUTLASS_DEVICE static int32_t count(const Params& p) {
    const auto below = [](int32_t walks) {  // walks of this block
      const int32_t rest = walks - int32_t(blockIdx.x);
      return rest > 0 ? (rest - 1) / int32_t(gridDim.x) + 1 : 0;
    };
    const int32_t short_ones = below(p.walks) - below(p.walks - p.g.strips);
    const int32_t missing = p.walks / p.g.strips * p.walk - p.tiles_of_strip;
    return below(p.walks) * p.walk - short_ones * missing;
  }

 private:
  int32_t walk_, index_;  // index_: among the strip's tiles of all images
  int32_t step_ = 0;

  CUTLASS_DEVICE void enter(const Params& p) {
    index_ = p.strips.divide(walk_) * p.walk;
    step_ = 0;
  }
};

/// tile_n consecutive pixels of the grid and the run of results, consecutive in memory, that they
/// yield.
struct Block {
  int32_t column;   // of the first pixel
  int32_t columns;  // of a row that exist
  int32_t width;    // of a row of results, as pixels of the grid; the rest of the pitch is a gap
  int32_t lead;     // results before the block's own: 0 or 1, so that column is even
  int32_t output;   // first result, in its plane
  int32_t end;      // of the run that these results are a piece of
  bool starts;      // the run starts here
};

/// First pixel of block `number` in its strip's grid.
CUTLASS_DEVICE int32_t first_pixel(const Params& p, int32_t number) {
  if (p.g.strip != 0) return number * p.g.stack * p.g.pitch;
  const int32_t output = number * p.g.block_outputs;
  const int32_t row = p.out_width.divide(output);
  return row * p.g.pitch + ((output - row * p.g.out_width) & ~1);
}

CUTLASS_DEVICE Block make_block(const Params& p, const Tile& tile, int32_t number) {
  const Geometry& g = p.g;
  Block block;
  if (g.strip != 0) {  // a block is a row of the strip
    const int32_t first = tile.strip * g.strip;
    block.column = 0;
    block.columns = g.out_width - first;
    block.width = g.pitch;
    block.lead = 0;
    block.output = number * g.stack * g.out_width + first;
    block.end = (number * g.stack + 1) * g.out_width;
    block.starts = first == 0;
    if (tile.strip + 1 < g.strips) block.end = min(block.end, block.output + g.strip + 2 * kSector);
  } else {
    block.output = number * g.block_outputs;
    const int32_t row = p.out_width.divide(block.output);
    block.column = block.output - row * g.out_width;
    block.lead = block.column % 2;
    block.column -= block.lead;
    block.output -= block.lead;
    block.width = g.out_width;
    block.columns = g.out_width;
    block.end = g.out_height * g.out_width;
    block.starts = number == 0;
  }
  return block;
}

/// The block `down` rows of results further down, where rows are stacked.
CUTLASS_DEVICE Block stacked_block(const Params& p, Block block, int32_t down) {
  block.output += down * p.g.out_width;
  block.end += down * p.g.out_width;
  if (block.end > p.g.out_height * p.g.out_width) block.columns = block.end = 0;
  return block;
}

/// A tile, as one warpgroup sees it: its output channels and image.
struct TileOf {
  int32_t group, m_tile, image;
  int32_t m_block;

  /// Row of the weights' tile that is this warp's row `of_warp`.
  CUTLASS_DEVICE int32_t row(int32_t of_warp) const {
    return m_block * 64 + int32_t(threadIdx.x) / 32 % 4 * 16 + of_warp;
  }
};

/// What a producer says of a patch; of two that were in one stage, so that the last one's may be
/// read until the next one is released.
struct PatchInfo {
  int32_t exponent;  // planes hold x * 2^exponent
  bool finite;       // all of them
  int32_t outer, image;
  int32_t offset[kMaxTileBlocks];  // of the blocks' first pixels in the patch, or in a ring in the
                                   // row that `steps` are of; < 0: there is no such block
  int32_t steps[kMaxTileBlocks];   // where the blocks' steps begin among all
  Block blocks[kMaxTileBlocks];
};

/// Where the weights' loader has got to, where they come through a ring.
struct SlabsAhead {
  Schedule schedule;
  const char* from;  // the next slab; null: all are loaded
  int32_t slab;      // its number
};

struct Control {
  uint64_t full[kMaxStages];   // a patch is there
  uint64_t empty[kMaxStages];  // nobody reads it any more
  uint64_t piece_full[kMaxPieces];
  uint64_t piece_empty[kMaxPieces];
  uint64_t slab_full[kMaxRing];
  uint64_t slab_empty[kMaxRing];
  PatchInfo info[2 * kMaxStages];  // by the patches' turns
  SlabsAhead ahead;
  uint32_t largest[3];  // bits of the patch's largest magnitude, taken in turn
};
static_assert(sizeof(Control) <= kControlBytes);

CUTLASS_DEVICE PatchInfo& info_of(Control& control, const Turn& turn) {
  return control.info[turn.phase * kMaxStages + turn.stage];
}

CUTLASS_DEVICE uint32_t shared_address(const void* pointer) {
  return cute::cast_smem_ptr_to_uint(pointer);
}

}  // namespace cutfuse::conv::shift::sm90
