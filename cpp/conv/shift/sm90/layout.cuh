/// \file
/// Where things lie: tiles of the result, their blocks of pixels, and the pipeline's barriers.
#pragma once

#include "conv/shift/params.h"
#include "conv/shift/sm90/instructions.cuh"

namespace cutfuse::conv::shift::sm90 {

inline constexpr int kConsumers = 256;  // threads: two warpgroups that multiply and store
/// Threads that read and convert: two warpgroups where accumulators leave their registers.
constexpr int producers(int tile_n, int planes) { return tile_n * planes <= 128 ? 256 : 128; }
inline constexpr int kMaxStages = 4;
inline constexpr int kMaxRing = 64;  // slabs of weights in shared memory
inline constexpr int kConsumerWarps = kConsumers / 32;

// Named barriers.
inline constexpr uint32_t kProducerBarrier = 1;
inline constexpr uint32_t kConsumerBarrier = 2;

struct Control {
  uint64_t full[kMaxStages];   // a patch is there
  uint64_t empty[kMaxStages];  // nobody reads it any more
  uint64_t slab_full[kMaxRing];
  uint64_t slab_empty[kMaxRing];
  int32_t exponent[kMaxStages];  // of the patch: planes hold x * 2^exponent
  uint32_t largest[3];           // bits of the patch's largest magnitude, taken in turn
};

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
};

/// What a row of the weights' tile needs afterwards.
struct RowConstants {
  float scale;  // of the folded steps and the weight's exponent
  float shift;
  int32_t exponent;
  int32_t plain;  // whether scale and shift may be used
};

struct Tile {
  int32_t group, m_tile, image, strip, first;  // block
};

CUTLASS_DEVICE Tile decode(const Params& p, int32_t index) {
  Tile tile;
  const int32_t outer = p.tiles_of_outer.divide(index);
  index -= outer * int32_t(p.tiles_of_outer.divisor);
  tile.image = p.tiles_of_image.divide(index);
  index -= tile.image * int32_t(p.tiles_of_image.divisor);
  tile.strip = p.tiles_of_strip.divide(index);
  tile.first = (index - tile.strip * int32_t(p.tiles_of_strip.divisor)) * p.g.tile_blocks;
  tile.group = p.m_tiles.divide(outer);
  tile.m_tile = outer - tile.group * p.g.m_tiles;
  return tile;
}

/// The tiles of this block: `walk` that follow each other, then as many further on.
class Schedule {
 public:
  CUTLASS_DEVICE explicit Schedule(const Params& p)
      : walk_(p.walk), count_(p.tile_count), index_(int32_t(blockIdx.x) * p.walk), p_(p) {}
  CUTLASS_DEVICE bool more() const { return index_ < count_; }
  CUTLASS_DEVICE int32_t index() const { return index_; }
  /// Whether the tile is the next one of its strip after the tile before it.
  CUTLASS_DEVICE bool follows() const {
    const int32_t strip = p_.tiles_of_strip.divide(index_);
    return step_ > 0 && index_ != strip * int32_t(p_.tiles_of_strip.divisor);
  }
  CUTLASS_DEVICE void next() {
    ++index_;
    if (++step_ == walk_) {
      step_ = 0;
      index_ += (int32_t(gridDim.x) - 1) * walk_;
    }
  }

 private:
  int32_t walk_, count_, index_;
  int32_t step_ = 0;
  const Params& p_;
};

/// tile_n consecutive pixels of the grid and the run of results, consecutive in memory, that they
/// yield.
struct Block {
  int32_t flat;     // the first pixel, in the strip's grid
  int32_t column;   // its column
  int32_t columns;  // of a row that exist
  int32_t width;    // of a row of results, as pixels of the grid; the rest of the pitch is a gap
  int32_t lead;     // results before the block's own: 0 or 1, so that column is even
  int32_t output;   // first result, in its plane
  int32_t end;      // of the run that these results are a piece of
  bool starts;      // the run starts here
};

CUTLASS_DEVICE Block make_block(const Params& p, const Tile& tile, int32_t number) {
  const Geometry& g = p.g;
  Block block;
  if (g.strip != 0) {  // a block is a row of the strip
    const int32_t first = tile.strip * g.strip;
    block.flat = number * g.pitch;
    block.column = 0;
    block.columns = g.out_width - first;
    block.width = g.pitch;
    block.lead = 0;
    block.output = number * g.out_width + first;
    block.end = (number + 1) * g.out_width;
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
    block.flat = row * g.pitch + block.column;
    block.columns = g.out_width;
    block.end = g.out_height * g.out_width;
    block.starts = number == 0;
  }
  return block;
}

CUTLASS_DEVICE uint32_t shared_address(const void* pointer) {
  return cute::cast_smem_ptr_to_uint(pointer);
}

}  // namespace cutfuse::conv::shift::sm90
