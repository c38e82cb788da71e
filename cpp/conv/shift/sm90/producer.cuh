/// \file
/// Writes a tile's patch of x as fp16 planes of eight channels a pixel. Each patch has a power of
/// two as its scale, taken from the one before and checked against what was written: if the
/// largest magnitude leaves fp16's range, the patch is measured and converted again.
#pragma once

#include <cuda_fp16.h>

#include "conv/shift/sm90/pieces.cuh"
#include "conv/shift/sm90/reader.cuh"
#include "program/fold.cuh"

namespace cutfuse::conv::shift::sm90 {

/// kAll: also 16-bit x and 16 bytes of channels together, which Role::kStore never has; kRings:
/// also patches that share a ring of rows.
template <int kPlanes, int kProducers, bool kAll, bool kRings>
class Producer {
 public:
  CUTLASS_DEVICE Producer(const Params& params, char* shared)
      : p_(params),
        shared_(shared),
        control_(*reinterpret_cast<Control*>(shared + params.shared.control)),
        thread_(int(threadIdx.x) - kConsumers),
        threads_(kProducers - (params.in_pieces ? 32 : 0)) {}

  CUTLASS_DEVICE void run() {
    if (p_.in_pieces) {
      if (thread_ < threads_) {
        AllPieces reader(p_, shared_, thread_);
        fill_all([&](const Patches& patches, int32_t stage) {
          return convert_pieces(reader, patches, stage);
        });
      } else if (thread_ == threads_) {
        bring_pieces(p_, shared_);
      }
      return;
    }
    if constexpr (kAll && kPlanes == 1) {
      if (p_.dtype != DType::kFloat32) return read_all<DirectReader>();
    }
    read_all<Reader<kAll>>();
  }

 private:
  using AllPieces = PieceReader<kProducers / 32 - 1, kAll>;

  const Params& p_;
  char* shared_;
  Control& control_;
  int thread_;
  int threads_;                               // that convert
  int32_t row_ = 0;                           // of the ring, that the patch begins in
  int32_t exponent_ = kPlanes == 2 ? 10 : 7;  // at first, of largest ones from 0.25, 0.125 on
  bool finite_ = true;                        // the patch before, as far as is known

  /// Whether the largest magnitude written is below infinity and above what keeps small values
  /// apart from zero.
  CUTLASS_DEVICE bool fits(float largest) const {
    constexpr float kLowest = kPlanes == 2 ? 256.f : 16.f;
    return largest < INFINITY && (largest >= kLowest || exponent_ >= 126);
  }

  template <class AnyReader>
  CUTLASS_DEVICE void read_all() {
    const Share share(p_, thread_, kProducers / 32);
    AnyReader reader(p_, shared_, share);
    if (p_.g.together == 2) {
      reader.template start<2>();
    } else {
      reader.template start<1>();
    }
    fill_all([&](const Patches& patches, int32_t stage) {
      return p_.g.together == 2 ? convert<2>(reader, share, patches, stage)
                                : convert<1>(reader, share, patches, stage);
    });
  }

  /// Fills the ring of stages; convert(patches, stage) writes a patch's new pixels with exponent_
  /// and returns the largest magnitude that this thread wrote.
  template <class Convert>
  CUTLASS_DEVICE void fill_all(const Convert& convert) {
    Turn turn;
    int32_t slot = 0;
    bool first_round = true;
    for (Patches patches(p_); patches.more(p_); patches.next(p_)) {
      if (!first_round) Barrier::wait(&control_.empty[turn.stage], turn.phase ^ 1);
      if (rings()) advance(patches, turn);
      fill(patches, turn, slot, convert);
      turn.next(p_.g.stages);
      if (turn.stage == 0) first_round = false;
      slot = slot == 2 ? 0 : slot + 1;
    }
  }

  template <class Convert>
  CUTLASS_DEVICE void fill(const Patches& patches, const Turn& turn, int32_t slot,
                           const Convert& convert) {
    const int32_t stage = turn.stage;
    const bool native = p_.dtype == DType::kFloat16;
    if (native) exponent_ = 0;
    PatchInfo& info = info_of(control_, turn);
    if (thread_ < p_.g.tile_blocks) describe(patches, thread_, info);
    if (!rings()) copy(stage, patches.advance, patches.begin);
    float largest = agree(convert(patches, stage), slot, false);
    if (!native && !fits(largest) && !(largest == 0.f && is_padding(patches))) {
      named_sync();
      const float magnitude = agree(measure(patches), slot, true);
      if (magnitude != 0.f) {
        exponent_ = min(13 - ilogbf(magnitude), 126);
        if (rings()) wait_for_previous(turn);  // which has rows that are converted again
        named_sync();
        largest = agree(convert_again(patches, stage), slot, true);
      }
    }
    finite_ = largest < INFINITY && (finite_ || patches.begin == 0);
    if (thread_ == 0) {
      info.exponent = exponent_;
      info.finite = finite_;
    }
    if (thread_ < kMaxTileBlocks) Barrier::arrive(&control_.full[stage]);
  }

  CUTLASS_DEVICE bool rings() const { return kRings && p_.g.ring_rows > 0; }

  /// Until the patch before `turn` has been read.
  CUTLASS_DEVICE void wait_for_previous(const Turn& turn) const {
    const Turn previous = turn.previous(p_.g.stages);
    Barrier::wait(&control_.empty[previous.stage], previous.phase);
  }

  /// Goes on in the ring: to the patch below, or to one that shares no row with that before it.
  CUTLASS_DEVICE void advance(const Patches& patches, const Turn& turn) {
    const bool anew = patches.begin == 0;
    if (anew && runs_empty(p_.g)) wait_for_previous(turn);
    row_ += anew ? patch_rows(p_.g) : tile_rows(p_.g);
    if (row_ >= p_.g.ring_rows) row_ -= p_.g.ring_rows;
  }

  /// Whether the patch's new pixels all lie below the image.
  CUTLASS_DEVICE bool is_padding(const Patches& patches) const {
    return locate(p_, patches.tile.strip, patches.flat + patches.begin).row >= p_.g.height;
  }

  CUTLASS_DEVICE void describe(const Patches& patches, int number, PatchInfo& info) const {
    const int32_t block = patches.tile.first + number;
    info.offset[number] = block < p_.g.blocks ? first_pixel(p_, block) - patches.flat : -1;
    info.steps[number] = 0;
    if (rings()) {
      info.offset[number] = min(info.offset[number], 0);
      const int32_t row = (row_ + number * p_.g.stack) % p_.g.ring_rows;
      info.steps[number] = row / p_.g.stack * p_.g.slabs * kSlabSteps;
    }
    info.blocks[number] = make_block(p_, patches.tile, block);
    if (number == 0) {
      info.outer = patches.tile.outer;
      info.image = patches.tile.image;
    }
  }

  /// The first `count` pixels, from the stage before where they are `advance` further on.
  CUTLASS_DEVICE void copy(int32_t stage, int32_t advance, int32_t count) const {
    if (count == 0) return;
    const int32_t before = stage == 0 ? p_.g.stages - 1 : stage - 1;
    char* patches = shared_ + p_.shared.patch;
    const int32_t bytes = p_.shared.group_bytes;
    const int32_t blocks = kPlanes * p_.g.chunk_groups;
    for (int32_t i = thread_; i < count; i += threads_) {
      const char* from = patches + before * p_.shared.stage_bytes + (i + advance) * 16;
      char* to = patches + stage * p_.shared.stage_bytes + i * 16;
      // Two are read before one is stored: the compiler cannot know that stages are apart.
      int32_t block = 0;
#pragma unroll 1
      for (; block + 1 < blocks; block += 2, from += 2 * bytes, to += 2 * bytes) {
        const uint4 first = *reinterpret_cast<const uint4*>(from);
        const uint4 second = *reinterpret_cast<const uint4*>(from + bytes);
        *reinterpret_cast<uint4*>(to) = first;
        *reinterpret_cast<uint4*>(to + bytes) = second;
      }
      if (block < blocks) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    }
  }

  CUTLASS_DEVICE void named_sync() const {
    cutlass::arch::NamedBarrier::sync(threads_, kProducerBarrier);
  }

  /// Waits for all threads. The largest of their values, which are not negative; a NaN counts as
  /// larger than all. Slots are taken in turn, so that one is cleared while nobody reads it.
  CUTLASS_DEVICE float agree(float largest, int slot, bool again) {
    if (again) {
      if (thread_ == 0) control_.largest[slot] = 0;
      named_sync();
    }
    const uint32_t of_warp = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
    if (thread_ % 32 == 0) atomicMax(&control_.largest[slot], of_warp);
    if (thread_ == 0) control_.largest[slot == 2 ? 0 : slot + 1] = 0;
    cutlass::arch::fence_view_async_shared();  // what was stored is for wgmma
    named_sync();
    return __uint_as_float(*reinterpret_cast<volatile uint32_t*>(&control_.largest[slot]));
  }

  CUTLASS_DEVICE char* plane(int32_t stage) const {
    return shared_ + p_.shared.patch + stage * p_.shared.stage_bytes;
  }

  /// body(where a pixel of the patch goes, of its stage's), for a ring or not.
  template <class Body>
  CUTLASS_DEVICE float with_place(const Body& body) const {
    if (!rings()) return body([](int32_t pixel) { return pixel; });
    const auto first = uint32_t(row_ * p_.g.pitch);
    const auto count = uint32_t(p_.g.ring_rows * p_.g.pitch);
    return body([first, count](uint32_t pixel) {  // of the ring's
      return int32_t(min(pixel + first, pixel + first - count));
    });
  }

  CUTLASS_DEVICE float convert_pieces(AllPieces& reader, const Patches& patches,
                                      int32_t stage) const {
    const float scale = power_of_two(exponent_);
    char* to = plane(stage);
    return with_place([&](const auto& place) {
      __half2 largest = __float2half2_rn(0.f);
      reader.for_patch(patches,
                       [&](const auto& items) { store_all(items, scale, to, place, largest); });
      return magnitude_of(largest);
    });
  }

  /// kBatch groups of a pixel at a time.
  template <int kBatch, class AnyReader>
  CUTLASS_DEVICE float convert(AnyReader& reader, const Share& share, const Patches& patches,
                               int32_t stage) const {
    const float scale = power_of_two(exponent_);
    const int32_t groups = patches.groups(p_);
    const int32_t patch = p_.g.patch;
    char* to = plane(stage);
    return with_place([&](const auto& place) {
      __half2 largest = __float2half2_rn(0.f);
      for (int32_t pixel = patches.begin + share.pixel; pixel - share.lane < patch;
           pixel += share.pixel_stride) {
#pragma unroll 1
        for (int32_t group = share.group; group < groups; group += kBatch * p_.g.group_warps) {
          Item items[kBatch];
          reader.template take<kBatch>(items);
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kBatch; ++i) {
            items[i].pixel = pixel;
            items[i].group = group + i * p_.g.group_warps;
            items[i].exists = pixel < patch && items[i].group < groups;
          }
          store_all(items, scale, to, place, largest);
          reader.template issue<kBatch>();
        }
      }
      return magnitude_of(largest);
    });
  }

  /// Converts the whole patch with exponent_, read anew.
  CUTLASS_DEVICE float convert_again(const Patches& patches, int32_t stage) const {
    const float scale = power_of_two(exponent_);
    return with_place([&](const auto& place) {
      __half2 largest = __float2half2_rn(0.f);
      for_all(patches, [&](const Item& item) {
        const Item items[1] = {item};
        store_all(items, scale, plane(stage), place, largest);
      });
      return magnitude_of(largest);
    });
  }

  /// The largest finite magnitude of the whole patch that this thread reads.
  CUTLASS_DEVICE float measure(const Patches& patches) const {
    float largest = 0.f;
    for_all(patches, [&](const Item& item) {
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kLanes; ++c) {
        const float magnitude = fabsf(item.v[c]);
        if (magnitude < INFINITY) largest = fmaxf(largest, magnitude);
      }
    });
    return largest;
  }

  /// body(item) for this thread's pixels of the patch.
  template <class Body>
  CUTLASS_DEVICE void for_all(const Patches& patches, const Body& body) const {
    const Lanes lanes(p_, shared_);
    const char* image = image_of(p_, patches.tile);
    const int32_t groups = patches.groups(p_);
#pragma unroll 1
    for (int32_t pixel = thread_; pixel < p_.g.patch; pixel += threads_) {
      const Source source = locate(p_, patches.tile.strip, patches.flat + pixel);
#pragma unroll 1
      for (int32_t group = 0; group < groups; ++group) {
        const int32_t first = (patches.first_group(p_) + group) * kLanes;
        Item item{{}, pixel, group, true};
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < kLanes; ++c) {
          const bool inside = source.inside(p_, lanes.phase(first + c));
          const char* from = image + (source.bytes + lanes.bytes(first + c));
          item.v[c] = inside ? load_value(from, 0, p_.dtype) : 0.f;
        }
        body(item);
      }
    }
  }

  CUTLASS_DEVICE static float magnitude_of(__half2 largest) {
    // Not fmaxf, which would drop a NaN. The bits of magnitudes order as they do.
    const uint32_t low = __float_as_uint(__low2float(largest));
    return __uint_as_float(max(low, __float_as_uint(__high2float(largest))));
  }

  /// Stores items' planes, those of which exist; without branches between them, so that they are
  /// converted side by side.
  template <int kCount, class Place>
  CUTLASS_DEVICE void store_all(const Item (&items)[kCount], float scale, char* to,
                                const Place& place, __half2& largest) const {
    uint32_t high[kCount][kLanes / 2];
    uint32_t low[kCount][kLanes / 2];
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < kCount; ++k) {
      const __half2 magnitude = split(items[k].v, scale, high[k], low[k]);
      if (items[k].exists) largest = __hmax2_nan(largest, magnitude);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < kCount; ++k) {
      if (!items[k].exists) continue;
      char* at = to + items[k].group * p_.shared.group_bytes + place(items[k].pixel) * 16;
      *reinterpret_cast<uint4*>(at) = {high[k][0], high[k][1], high[k][2], high[k][3]};
      if constexpr (kPlanes == 2) {
        *reinterpret_cast<uint4*>(at + p_.shared.plane_bytes) = {low[k][0], low[k][1], low[k][2],
                                                                 low[k][3]};
      }
    }
  }

  /// Planes of v * scale; returns the largest magnitudes of the first.
  CUTLASS_DEVICE static __half2 split(const float (&v)[kLanes], float scale,
                                      uint32_t (&high)[kLanes / 2], uint32_t (&low)[kLanes / 2]) {
    __half2 largest = __float2half2_rn(0.f);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLanes / 2; ++i) {
      const float a = v[2 * i] * scale;
      const float b = v[2 * i + 1] * scale;
      const __half2 pair = __floats2half2_rn(a, b);
      high[i] = *reinterpret_cast<const uint32_t*>(&pair);
      largest = __hmax2_nan(largest, __habs2(pair));
      if constexpr (kPlanes == 2) {
        const float2 rounded = __half22float2(pair);
        const __half2 rest = __floats2half2_rn(a - rounded.x, b - rounded.y);
        low[i] = *reinterpret_cast<const uint32_t*>(&rest);
      }
    }
    return largest;
  }
};

}  // namespace cutfuse::conv::shift::sm90
