/// \file
/// How a producer's warp reads its part of the patches: in items of 32 pixels of eight
/// lane-channels, several on their way at once.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "conv/shift/sm90/source.cuh"
#include "device/values.cuh"

namespace cutfuse::conv::shift::sm90 {

/// Which items of a patch a producer's warp takes: some of the pixels, some of the groups.
struct Share {
  int32_t warp, lane;
  int32_t pixel, pixel_stride;  // this lane's first
  int32_t group;                // first; they are Geometry::group_warps apart

  CUTLASS_DEVICE Share(const Params& p, int thread, int warps)
      : warp(thread / 32), lane(thread % 32) {
    const int32_t pixel_warps = warps / p.g.group_warps;
    pixel_stride = pixel_warps * 32;
    pixel = warp % pixel_warps * 32 + lane;
    group = warp / pixel_warps;
  }
};

/// The items of one producer's warp, in the order in which it takes them.
class Items {
 public:
  CUTLASS_DEVICE Items(const Params& params, char* shared, const Share& share)
      : p_(params), lanes_(params, shared), patches_(params), share_(share) {
    enter();
  }

 protected:
  const Params& p_;
  Lanes lanes_;
  const char* image_;
  Source source_;

  CUTLASS_DEVICE bool more() const { return patches_.more(p_); }

  /// body(i, first lane-channel, whether this lane has one) for the next `kBatch` groups.
  template <int kBatch, class Body>
  CUTLASS_DEVICE void next(const Body& body) {
    const int32_t groups = patches_.groups(p_);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      const int32_t group = group_ + i * p_.g.group_warps;
      body(i, (patches_.first_group(p_) + group) * kLanes, pixel_ < p_.g.patch && group < groups);
    }
    group_ += kBatch * p_.g.group_warps;
    if (group_ >= groups) {
      group_ = share_.group;
      pixel_ += share_.pixel_stride;
      if (pixel_ - share_.lane < p_.g.patch) {
        source_ = locate(p_, patches_.tile.strip, patches_.flat + pixel_);
      } else {
        patches_.next(p_);
        enter();
      }
    }
  }

 private:
  Patches patches_;
  Share share_;
  int32_t pixel_;
  int32_t group_;

  /// Goes on to the next patch of which the warp has an item.
  CUTLASS_DEVICE void enter() {
    group_ = share_.group;
    for (; patches_.more(p_); patches_.next(p_)) {
      pixel_ = patches_.begin + share_.pixel;
      if (pixel_ - share_.lane < p_.g.patch && group_ < patches_.groups(p_)) {
        image_ = image_of(p_, patches_.tile);
        source_ = locate(p_, patches_.tile.strip, patches_.flat + pixel_);
        return;
      }
    }
  }
};

/// Has a warp's items of fp32 brought to shared memory, several batches ahead. A lane reads what it
/// has had brought itself.
template <bool kTogether>
class Reader : Items {
 public:
  CUTLASS_DEVICE Reader(const Params& params, char* shared, const Share& share)
      : Items(params, shared, share) {
    const int32_t room = params.g.raw_depth * params.g.together * kRawItemBytes;
    raw_ = shared_address(shared) + params.shared.raw + share.warp * room;
    // Eight lanes' halves of a pixel lie in all banks.
    raw_ += together() ? share.lane * 32 + share.lane / 4 % 2 * 16
                       : share.lane * (params.lane_pairs ? 8 : 4);
  }

  /// Before the first take(): as many batches as there is room for.
  template <int kBatch>
  CUTLASS_DEVICE void start() {
#pragma unroll 1
    for (int i = 0; i < p_.g.raw_depth; ++i) issue<kBatch>();
  }

  /// The values of the oldest batch of items; issue() brings another in its place.
  template <int kBatch>
  CUTLASS_DEVICE void take(Item (&items)[kBatch]) const {
    wait_but(p_.g.raw_depth - 1);
    const uint32_t from = raw_ + slot_ * (kBatch * kRawItemBytes);
    if (together()) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < kLanes; c += 4) {
          asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                       : "=f"(items[i].v[c]), "=f"(items[i].v[c + 1]), "=f"(items[i].v[c + 2]),
                         "=f"(items[i].v[c + 3])
                       : "r"((from ^ c * 4) + i * kRawItemBytes));
        }
      }
    } else if (p_.lane_pairs) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < kLanes; c += 2) {
          asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                       : "=f"(items[i].v[c]), "=f"(items[i].v[c + 1])
                       : "r"(from + i * kRawItemBytes + c * 128));
        }
      }
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < kLanes; ++c) {
          asm volatile("ld.shared.f32 %0, [%1];"
                       : "=f"(items[i].v[c])
                       : "r"(from + i * kRawItemBytes + c * 128));
        }
      }
    }
  }

  template <int kBatch>
  CUTLASS_DEVICE void issue() {
    if (more()) {
      const uint32_t to = raw_ + slot_ * (kBatch * kRawItemBytes);
      next<kBatch>(
          [&](int i, int32_t first, bool mine) { copy(to + i * kRawItemBytes, first, mine); });
    }
    cute::cp_async_fence();
    slot_ = slot_ + 1 == p_.g.raw_depth ? 0 : slot_ + 1;
  }

 private:
  int32_t slot_ = 0;
  uint32_t raw_;

  CUTLASS_DEVICE bool together() const { return kTogether && p_.channels_together; }

  /// Waits until no more than so many batches are on their way.
  CUTLASS_DEVICE static void wait_but(int32_t batches) {
    static_assert(kMostAhead == 8);
    if (batches == 7) {
      cute::cp_async_wait<7>();
    } else if (batches >= 3) {
      cute::cp_async_wait<3>();
    } else if (batches == 2) {
      cute::cp_async_wait<2>();
    } else if (batches == 1) {
      cute::cp_async_wait<1>();
    } else {
      cute::cp_async_wait<0>();
    }
  }

  /// kBytes from x, or zeros.
  template <int kBytes>
  CUTLASS_DEVICE static void bring(uint32_t to, const char* from, bool exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes),
                 "r"(exists ? kBytes : 0)
                 : "memory");
  }

  /// The lane-channels from `first` on of this lane's pixel.
  CUTLASS_DEVICE void copy(uint32_t to, int32_t first, bool mine) const {
    const Geometry& g = p_.g;
    if (p_.one_phase) {
      const uint32_t bytes = source_.bytes + uint32_t(first) * p_.channel_bytes;
      const bool inside = mine && source_.phases != 0;
      const int32_t channels = g.channels - first;
      const char* from = image_ + bytes;
      if (channels >= kLanes) {
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < kLanes; ++c, from += p_.channel_bytes) {
          bring<4>(to + c * 128, from, inside);
        }
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < kLanes; ++c, from += p_.channel_bytes) {
          bring<4>(to + c * 128, from, inside && c < channels);
        }
      }
      return;
    }
    if (p_.lanes_are_channels) {  // of one phase each
      const uint32_t bytes = source_.bytes + lanes_.bytes(first);
      const bool inside = mine && source_.inside(p_, lanes_.phase(first));
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kLanes; ++c) {
        bring<4>(to + c * 128, image_ + (bytes + c * p_.channel_bytes),
                 inside && lanes_.phase(first + c).row >= 0);
      }
      return;
    }
    if (together()) {
      const char* from = image_ + (source_.bytes + lanes_.bytes(first));
      const bool inside = mine && source_.inside(p_, lanes_.phase(first));
      bring<16>(to, from, inside);
      bring<16>(to ^ 16, from + 16, inside && lanes_.phase(first + 4).row >= 0);
      return;
    }
    uint32_t bytes[kLanes];
    lanes_.bytes(first, bytes);
    uint32_t inside = 0;
    if (p_.phase_masks) {
      const int32_t lanes = g.channels * g.phases_h * g.phases_w - first;
      inside =
          source_.phases >> (first & p_.last_phase) & (lanes < kLanes ? (1u << lanes) - 1 : 0xffu);
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kLanes; ++c) {
        inside |= uint32_t(source_.inside(p_, lanes_.phase(first + c))) << c;
      }
    }
    if (!mine) inside = 0;
    if (p_.lane_pairs) {
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kLanes; c += 2) {
        bring<8>(to + c * 128, image_ + (source_.bytes + bytes[c]), (inside >> c & 1) != 0);
      }
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kLanes; ++c) {
        bring<4>(to + c * 128, image_ + (source_.bytes + bytes[c]), (inside >> c & 1) != 0);
      }
    }
  }
};

/// As Reader, of 16-bit x, whose elements asynchronous copies cannot name: loads to registers, one
/// batch ahead.
class DirectReader : Items {
 public:
  using Items::Items;

  template <int kBatch>
  CUTLASS_DEVICE void start() {
    issue<kBatch>();
  }

  template <int kBatch>
  CUTLASS_DEVICE void take(Item (&items)[kBatch]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kLanes; c += 2) {
        const float2 pair = p_.channels_together
                                ? unpack_pair(bits_[i][c / 2], p_.dtype)
                                : unpack_pair(bits_[i][c] | bits_[i][c + 1] << 16, p_.dtype);
        items[i].v[c] = pair.x;
        items[i].v[c + 1] = pair.y;
      }
    }
  }

  template <int kBatch>
  CUTLASS_DEVICE void issue() {
    if (!more()) return;
    next<kBatch>([&](int i, int32_t first, bool mine) { load(bits_[i], first, mine); });
  }

 private:
  uint32_t bits_[2][kLanes];

  CUTLASS_DEVICE void load(uint32_t (&bits)[kLanes], int32_t first, bool mine) const {
    if (p_.channels_together) {
      const bool inside = mine && source_.inside(p_, lanes_.phase(first));
      const auto* from =
          reinterpret_cast<const uint4*>(image_ + (source_.bytes + lanes_.bytes(first)));
      *reinterpret_cast<uint4*>(bits) = inside ? __ldg(from) : uint4{};
      return;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < kLanes; ++c) {
      const bool inside = mine && source_.inside(p_, lanes_.phase(first + c));
      const auto* from = reinterpret_cast<const unsigned short*>(
          image_ + (source_.bytes + lanes_.bytes(first + c)));
      bits[c] = inside ? __ldg(from) : 0;
    }
  }
};

}  // namespace cutfuse::conv::shift::sm90
