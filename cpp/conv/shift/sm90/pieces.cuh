/// \file
/// x by the copy engine: pieces of a patch, some rows of the grid of some channels, that one warp
/// has brought to a ring in shared memory. A row there is as long as the grid's, so that pixels
/// that follow each other in the grid do so there; of channels_last, with eight channels of each.
#pragma once

#include "conv/shift/sm90/source.cuh"

namespace cutfuse::conv::shift::sm90 {

/// The pieces of a patch, in order.
class Pieces {
 public:
  CUTLASS_DEVICE Pieces(const Params& p, const Patches& patches) : p_(p), patches_(patches) {
    const Geometry& g = p.g;
    first_ = p.pitch.divide(patches.flat + patches.begin);
    last_ = p.pitch.divide(patches.flat + g.patch - 1);
    row_ = first_;
    blocks_ = g.phase_channels == 0                        ? 1
              : g.lane_groups == g.phase_channels / kLanes ? patches.groups(p)
                                                           : g.phase_channels / kLanes;
  }

  CUTLASS_DEVICE bool more() const { return block_ < blocks_; }
  CUTLASS_DEVICE void next() {
    row_ += p_.g.piece_rows;
    if (row_ > last_) {
      row_ = first_;
      ++block_;
    }
  }

  /// First row of the grid.
  CUTLASS_DEVICE int32_t row() const { return row_; }
  /// Its channels are those from kLanes * block() on, of the chunk; or all.
  CUTLASS_DEVICE int32_t block() const { return block_; }
  /// Where its first pixel lies in the patch, perhaps before it.
  CUTLASS_DEVICE int32_t offset() const { return row_ * p_.g.pitch - patches_.flat; }

 private:
  const Params& p_;
  const Patches& patches_;
  int32_t first_, last_, row_;
  int32_t block_ = 0, blocks_;
};

/// What the copy engine writes of a piece.
CUTLASS_DEVICE uint32_t bytes_of_box(const Geometry& g) {
  return g.piece_rows * g.phases_h * g.pitch * g.stride_w * g.piece_channels * sizeof(float);
}

/// Columns of x that a piece begins before its row of the grid: rows of NCHW begin at 16 bytes.
CUTLASS_DEVICE int32_t early_of(const Params& p) { return p.channels_together ? 0 : p.g.early; }

/// Clears what is read after each piece, with the last pixel of its last row, where boxes begin
/// early: what an earlier kernel left there would pass for x out of fp16's range.
CUTLASS_DEVICE void clear_guards(const Params& p, char* shared) {
  const Geometry& g = p.g;
  if (p.in_pieces && g.early > 0 && int32_t(threadIdx.x) < g.pieces) {
    char* piece = shared + p.shared.raw + threadIdx.x * g.piece_bytes;
    *reinterpret_cast<uint4*>(piece + bytes_of_box(g)) = {};
  }
}

/// Brings all pieces, in order; one thread.
CUTLASS_DEVICE void bring_pieces(const Params& p, char* shared) {
  const Geometry& g = p.g;
  auto& control = *reinterpret_cast<Control*>(shared + p.shared.control);
  const uint32_t ring = shared_address(shared) + p.shared.raw;
  const uint32_t bytes = bytes_of_box(g);
  Turn turn;
  bool first_round = true;
  for (Patches patches(p); patches.more(p); patches.next(p)) {
    const int32_t group = p.m_tiles.divide(patches.tile.outer);
    const int32_t x = patches.tile.strip * g.strip * g.stride_w - g.pad_w - early_of(p);
    for (Pieces pieces(p, patches); pieces.more(); pieces.next()) {
      if (!first_round) Barrier::wait(&control.piece_empty[turn.stage], turn.phase ^ 1);
      uint64_t* full = &control.piece_full[turn.stage];
      TransactionBarrier::arrive_and_expect_tx(full, bytes);
      const int32_t channel =
          g.phase_channels == 0 ? 0 : (patches.first_group(p) + pieces.block()) * kLanes;
      const int32_t y = pieces.row() * g.stride_h - g.pad_h;
      const bool last = p.channels_together;
      asm volatile(
          "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
          "{%3, %4, %5, %6, %7}], [%2];" ::"r"(ring + turn.stage * g.piece_bytes),
          "l"(&p.map), "r"(shared_address(full)), "r"(last ? channel : x), "r"(last ? x : y),
          "r"(last ? y : channel), "r"(group), "r"(patches.tile.image)
          : "memory");
      turn.next(g.pieces);
      if (turn.stage == 0) first_round = false;
    }
  }
}

/// Converts pieces with `kWarps` warps, each some of 32 pixels of a group at a time; kLast: also
/// those of channels_last.
template <int kWarps, bool kLast>
class PieceReader {
 public:
  CUTLASS_DEVICE PieceReader(const Params& params, char* shared, int thread)
      : p_(params),
        control_(*reinterpret_cast<Control*>(shared + params.shared.control)),
        lanes_(params, shared),
        ring_(shared + params.shared.raw),
        warp_(thread / 32),
        lane_(thread % 32) {}

  /// body(items) for this thread's items of a patch's new pixels: two at once, where there are two,
  /// so that neither waits for itself alone.
  template <class Body>
  CUTLASS_DEVICE void for_patch(const Patches& patches, const Body& body) {
    if (kLast && p_.channels_together) return for_last(patches, body);
    if (p_.one_phase) {
      return p_.g.stride_w == 1 ? for_channels<1>(patches, body) : for_channels<0>(patches, body);
    }
    switch (p_.lanes_together) {
      case 4:
        return for_phases<4>(patches, body);
      case 2:
        return for_phases<2>(patches, body);
      default:
        return for_phases<1>(patches, body);
    }
  }

 private:
  const Params& p_;
  Control& control_;
  Lanes lanes_;
  const char* ring_;
  int32_t warp_, lane_;
  Turn turn_;
  int32_t taken_ = 0;  // of kWarps: who has the next item

  /// A piece, as a thread sees it.
  struct Piece {
    const char* from;    // the patch's first pixel in it, this lane's
    int32_t begin, end;  // pixels of the patch
    int32_t item, items;
  };

  /// For each piece once it is there: body(piece, which piece).
  template <class Body>
  CUTLASS_DEVICE void for_pieces(const Patches& patches, int32_t groups, int32_t step,
                                 const Body& body) {
    const Geometry& g = p_.g;
    for (Pieces pieces(p_, patches); pieces.more(); pieces.next()) {
      const int32_t offset = pieces.offset();
      Piece piece;
      piece.begin = max(offset, patches.begin);
      piece.end = min(offset + g.piece_rows * g.pitch, g.patch);
      piece.items = ((piece.end - piece.begin + 31) >> 5) * groups;
      piece.from = ring_ + turn_.stage * g.piece_bytes + (piece.begin - offset + lane_) * step +
                   early_of(p_) * 4;
      piece.item = warp_ - taken_;
      if (piece.item < 0) piece.item += kWarps;
      taken_ = (taken_ + piece.items) % kWarps;
      Barrier::wait(&control_.piece_full[turn_.stage], turn_.phase);
      body(piece, pieces.block());
      __syncwarp();
      if (lane_ == 0) Barrier::arrive(&control_.piece_empty[turn_.stage]);
      turn_.next(g.pieces);
    }
  }

  template <class Take, class Body>
  CUTLASS_DEVICE static void for_items(const Piece& piece, const Take& take, const Body& body) {
    int32_t item = piece.item;
#pragma unroll 1
    for (; item + kWarps < piece.items; item += 2 * kWarps) {
      const Item both[2] = {take(item), take(item + kWarps)};
      body(both);
    }
    if (item < piece.items) {
      const Item one[1] = {take(item)};
      body(one);
    }
  }

  /// Of one phase: a piece has eight channels. kStride: of columns, or 0, not known: it is more
  /// than 1 where dilation is a multiple of it.
  template <int kStride, class Body>
  CUTLASS_DEVICE void for_channels(const Patches& patches, const Body& body) {
    const int32_t step = (kStride > 0 ? kStride : p_.g.stride_w) * 4;
    const int32_t channel = p_.g.piece_rows * p_.g.pitch * step;
    for_pieces(patches, 1, step, [&](const Piece& piece, int32_t group) {
      const auto take = [&](int32_t item) {
        Item taken;
        const char* from = piece.from + item * (32 * step);
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < kLanes; ++c) load<1>(from + c * channel, &taken.v[c]);
        taken.pixel = piece.begin + item * 32 + lane_;
        taken.group = group;
        taken.exists = taken.pixel < piece.end;
        return taken;
      };
      for_items(piece, take, body);
    });
  }

  /// Of channels_last: a pixel's eight channels are next to each other, their halves swizzled.
  template <class Body>
  CUTLASS_DEVICE void for_last(const Patches& patches, const Body& body) {
    const Geometry& g = p_.g;
    const auto groups = int32_t(p_.piece_groups.divisor);
    const int32_t step = g.stride_w * kLastPixelBytes;
    for_pieces(patches, groups, step, [&](const Piece& piece, int32_t first) {
      const auto take = [&](int32_t item) {
        Item taken;
        const int32_t block = p_.piece_groups.divide(item);
        const int32_t group = item - block * groups;
        const int32_t pixel = piece.begin + block * 32 + lane_;
        const int32_t inside = min(pixel, piece.end - 1) - piece.begin - lane_;
        const char* from = piece.from + inside * step + lanes_.in_piece(group * kLanes);
        const int32_t turned = int32_t(shared_address(from) >> 3) & 16;
        load<4>(from + turned, &taken.v[0]);
        load<4>(from + (16 - turned), &taken.v[4]);
        taken.pixel = pixel;
        taken.group = first + group * (g.phase_channels / kLanes);
        taken.exists = taken.pixel < piece.end;
        return taken;
      };
      for_items(piece, take, body);
    });
  }

  /// kTogether: lane-channels that are one load.
  template <int kTogether, class Body>
  CUTLASS_DEVICE void for_phases(const Patches& patches, const Body& body) {
    const Geometry& g = p_.g;
    // Groups that a piece has, and how far apart they are.
    const int32_t apart = g.phase_channels == 0 ? 1 : g.phase_channels / kLanes;
    const auto groups = int32_t(p_.piece_groups.divisor);
    const int32_t step = g.stride_w * 4;
    for_pieces(patches, groups, step, [&](const Piece& piece, int32_t first) {
      const auto take = [&](int32_t item) {
        Item taken;
        const int32_t block = p_.piece_groups.divide(item);
        const int32_t group = item - block * groups;
        int32_t at[kLanes];
        lanes_.in_piece(group * kLanes, at);
        const char* from = piece.from + block * 32 * step;
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < kLanes; c += kTogether) load<kTogether>(from + at[c], &taken.v[c]);
        taken.pixel = piece.begin + block * 32 + lane_;
        taken.group = first + group * apart;
        taken.exists = taken.pixel < piece.end;
        return taken;
      };
      for_items(piece, take, body);
    });
  }

  template <int kTogether>
  CUTLASS_DEVICE static void load(const char* from, float* v) {
    if constexpr (kTogether == 4) {
      *reinterpret_cast<float4*>(v) = *reinterpret_cast<const float4*>(from);
    } else if constexpr (kTogether == 2) {
      *reinterpret_cast<float2*>(v) = *reinterpret_cast<const float2*>(from);
    } else {
      *v = *reinterpret_cast<const float*>(from);
    }
  }
};

}  // namespace cutfuse::conv::shift::sm90
