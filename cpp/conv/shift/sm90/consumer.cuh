/// \file
/// Multiplies: every filter tap reads the same patch, shifted. At ieee the accumulator is promoted
/// to a second fp32 register set every slab (64 of K), as in gemm/sm90/mainloop.cuh, or sooner.
/// Tiles of 256 pixels have no registers for a second set: multiply_in_parts.
#pragma once

#include "conv/shift/sm90/slabs.cuh"
#include "program/fold.cuh"

namespace cutfuse::conv::shift::sm90 {

template <int kN, int kPlanes, class Element>
class Multiplier {
 public:
  static constexpr int kValues = kN / 2;

  CUTLASS_DEVICE Multiplier(const Params& params, char* shared)
      : p_(params),
        control_(*reinterpret_cast<Control*>(shared + params.shared.control)),
        patches_(shared_address(shared) + params.shared.patch),
        slabs_(params, shared),
        turns_(params.turns) {
    if (turns_ != Turns::kNone && threadIdx.x >= 128) pass_turn();
    slabs_.start();
  }

  /// A new (group, m tile), after both warpgroups are done with the old one.
  CUTLASS_DEVICE void replace_weights(int32_t outer) { slabs_.replace(outer); }

  /// Waits for the next tile's patch, or for its first chunk of channels; calls idle() if it is not
  /// there.
  template <class Idle>
  CUTLASS_DEVICE const PatchInfo& next(const Idle& idle) {
    uint64_t* full = &control_.full[turn_.stage];
    if (!__all_sync(0xffffffffu, Barrier::test_wait(full, turn_.phase, 1))) {
      idle();
      Barrier::wait(full, turn_.phase);
    }
    return info_of(control_, turn_);
  }

  /// Of the tile's last patch, after it was released: until the next tile's is.
  CUTLASS_DEVICE const PatchInfo& last() const {
    return info_of(control_, turn_.previous(p_.g.stages));
  }

  /// After next(): v is the sum over all chunks for the pixels from `first` of the patch on, scaled
  /// by 2^exponent and the weights'. Returns whether all of x was finite. Of one plane, calls
  /// meanwhile() once, while products are on their way.
  template <class Meanwhile>
  CUTLASS_DEVICE bool run(float (&v)[kValues], int32_t& exponent, int32_t first, int32_t m_block,
                          const Meanwhile& meanwhile) {
    if constexpr (kPlanes == 2 && !kInParts) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kValues; ++i) v[i] = 0.f;
    }
    return for_chunks(0, exponent, true, [&](int32_t chunk, int32_t change) {
      if constexpr (kPlanes == 1 && takes_chunks(kN)) rescale(v, change);
      if (turns_ == Turns::kOfTiles) wait_turn();
      if constexpr (kInParts) {
        multiply_in_parts(v, patch_at(first), m_block);
      } else if constexpr (kPlanes == 2) {
        if (change != 0) rescale(v, change);
        add_short(v, p_.chunk_slab[chunk], p_.chunk_steps[chunk], patch_at(first), m_block);
      } else {
        multiply(v, chunk, patch_at(first), m_block, meanwhile);
      }
      if (turns_ == Turns::kOfTiles) pass_turn();
    });
  }

  /// After next(), where Params::begins_ahead: the products of the tile's first slab are on their
  /// way to `sum`, until finish_begun(). Without a tile, those of whatever is there: a branch would
  /// serialise wgmma.
  CUTLASS_DEVICE void begin(float (&sum)[kValues], bool tile, int32_t first, int32_t m_block) {
    const uint32_t weights = tile ? slabs_.wait(0, kSlabSteps) : slabs_.any();
    issue<0, kSlabSteps, kSlabSteps, 3>(sum, slab_at(weights, 0, patch_at(first), m_block));
  }

  /// After begin(): as run().
  CUTLASS_DEVICE bool finish_begun(float (&v)[kValues], float (&sum)[kValues], int32_t& exponent,
                                   int32_t first, int32_t m_block) {
    const int32_t left = p_.chunk_steps[0] - kSlabSteps;
    const uint32_t patch = patch_at(first);
    const Slab next = meanwhile_find(1, left, patch, m_block);
    finish_slab(sum, [&](int i) { v[i] = sum[i] * p_.promotion; });
    add_slabs(v, next, 1, left, patch, m_block);
    const PatchInfo& info = info_of(control_, turn_);
    exponent = info.exponent;
    const bool finite = info.finite;
    finish_chunk();
    return for_chunks(1, exponent, finite, [&](int32_t chunk, int32_t change) {
      if (change != 0) rescale(v, change);
      const int32_t slab = p_.chunk_slab[chunk];
      const uint32_t patch = patch_at(first);
      add_slabs(v, slab_of(slab, patch, m_block), slab, p_.chunk_steps[chunk], patch, m_block);
    });
  }

  /// After begin() without a tile.
  CUTLASS_DEVICE static void wait_for(float (&sum)[kValues]) {
    cute::warpgroup_wait<0>();
    fence(sum);
  }

  /// After the last tile: the other warpgroup's turn has been passed once more than it waits.
  CUTLASS_DEVICE void finish() {
    if (turns_ != Turns::kNone && threadIdx.x < 128) wait_turn();
  }

 private:
  static constexpr bool kInParts = in_parts(kN, kPlanes);
  using Mma = Instruction<kN, Element>;

  const Params& p_;
  Control& control_;
  uint32_t patches_;
  Slabs slabs_;
  Turn turn_;
  Turns turns_;
  int32_t leaving_ = -1;  // slot of the slab whose products are on their way

  /// body(chunk, by how much its exponent differs from the one before) for the chunks of a tile from
  /// `begin` on; 0: of the first one by nothing. Returns whether all of x was finite.
  template <class Body>
  CUTLASS_DEVICE bool for_chunks(int32_t begin, int32_t& exponent, bool finite, const Body& body) {
    // Without the loop where there is one chunk: in it the compiler would serialise wgmma.
    const int32_t chunks = takes_chunks(kN) ? p_.g.chunks : 1;
    for (int32_t chunk = begin; chunk < chunks; ++chunk) {
      if (chunk > 0) Barrier::wait(&control_.full[turn_.stage], turn_.phase);
      const PatchInfo& info = info_of(control_, turn_);
      const int32_t here = info.exponent;
      finite = finite && info.finite;
      const int32_t change = chunk > 0 ? here - exponent : 0;
      exponent = here;
      body(chunk, change);
      finish_chunk();
    }
    slabs_.finish_tile();
    return finite;
  }

  /// The patch has been read.
  CUTLASS_DEVICE void finish_chunk() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) Barrier::arrive(&control_.empty[turn_.stage]);
    turn_.next(p_.g.stages);
  }

  /// Of the present stage, from pixel `first` on.
  CUTLASS_DEVICE uint32_t patch_at(int32_t first) const {
    return patches_ + turn_.stage * p_.shared.stage_bytes + first * 16;
  }

  /// Of a step's weights.
  CUTLASS_DEVICE uint32_t plane_bytes() const { return p_.g.weight_rows * kRowStepBytes; }

  CUTLASS_DEVICE static void wait_turn() {
    cutlass::arch::NamedBarrier::sync(kConsumers, kTurnBarrier + threadIdx.x / 128);
  }
  CUTLASS_DEVICE static void pass_turn() {
    cutlass::arch::NamedBarrier::arrive(kConsumers, kTurnBarrier + (1 - threadIdx.x / 128));
  }

  /// v *= 2^e. One plane's v is the accumulator: a branch would serialise wgmma.
  CUTLASS_DEVICE static void rescale(float (&v)[kValues], int32_t e) {
    const float factor = power_of_two(max(min(e, 126), -126));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kValues; ++i) v[i] *= factor;
  }

  /// The steps of a slab, or of several that lie one after the other: where their weights are, and
  /// the patch's words. Instructions that follow each other without a loop cost a third of its
  /// issue slots.
  struct Steps {
    uint32_t a, a_stride;
    const uint32_t* words;
    uint32_t patch;

    CUTLASS_DEVICE uint32_t weight(int step) const { return a + step * a_stride; }
    CUTLASS_DEVICE uint32_t pixels(int step) const { return words[step] + patch; }
    CUTLASS_DEVICE void next(int count = 1) {
      a += count * a_stride;
      words += count;
    }
  };

  CUTLASS_DEVICE Steps steps_at(uint32_t weights, int32_t slab, uint32_t patch,
                                int32_t m_block) const {
    return {operand_word(weights + m_block * 64 * 16, plane_bytes() / 2),
            kPlanes * plane_bytes() >> 4, &p_.steps[slab * kSlabSteps], patch >> 4};
  }
  /// Waits for the slabs of `count` steps, from slab `slab` on.
  CUTLASS_DEVICE Steps steps_of(int32_t slab, int32_t count, uint32_t patch, int32_t m_block) {
    return steps_at(slabs_.wait(slab, count), slab, patch, m_block);
  }

  /// One plane: v is the accumulator of all chunks.
  template <class Meanwhile>
  CUTLASS_DEVICE void multiply(float (&v)[kValues], int32_t chunk, uint32_t patch, int32_t m_block,
                               const Meanwhile& meanwhile) {
    const int32_t first = p_.chunk_slab[chunk];
    const int32_t steps = p_.chunk_steps[chunk];
    // Slabs that stay lie one after the other; they are one piece.
    const int32_t piece = slabs_.stay() ? steps : kSlabSteps;
    fence(v);
    int32_t held = 0;  // slabs not yet released
    for (int32_t done = 0; done < steps; done += piece) {
      const int32_t count = min(steps - done, piece);
      add(v, steps_of(first + done / kSlabSteps, count, patch, m_block), count,
          chunk > 0 || done > 0);
      ++held;
      if (held > 1 && count == kSlabSteps) {  // then those before are done
        cute::warpgroup_wait<1>();
        slabs_.refill();
        slabs_.release();
        --held;
      }
    }
    if (chunk == 0) meanwhile();
    cute::warpgroup_wait<0>();
    fence(v);
#pragma unroll 1
    for (; held > 0; --held) {
      slabs_.refill();
      slabs_.release();
    }
  }

  /// A slab's four steps, found while products of another run.
  struct Slab {
    uint32_t a, a_stride;
    uint32_t b[kSlabSteps];

    CUTLASS_DEVICE uint32_t weight(int step) const { return a + step * a_stride; }
    CUTLASS_DEVICE uint32_t pixels(int step) const { return b[step]; }
  };

  CUTLASS_DEVICE Slab slab_at(uint32_t weights, int32_t slab, uint32_t patch,
                              int32_t m_block) const {
    Slab found{operand_word(weights + m_block * 64 * 16, plane_bytes() / 2),
               kPlanes * plane_bytes() >> 4, {}};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSlabSteps; ++i) {
      found.b[i] = p_.steps[slab * kSlabSteps + i] + (patch >> 4);
    }
    return found;
  }
  CUTLASS_DEVICE Slab slab_of(int32_t slab, uint32_t patch, int32_t m_block) {
    return slab_at(slabs_.wait(slab, kSlabSteps), slab, patch, m_block);
  }

  /// While a slab's products run: the one before is replaced, and slab `slab` waited for if there
  /// are `left` steps more.
  CUTLASS_DEVICE Slab meanwhile_find(int32_t slab, int32_t left, uint32_t patch, int32_t m_block) {
    slabs_.refill();
    leaving_ = slabs_.leave();
    Slab next{};
    if (left > 0) next = slab_of(slab, patch, m_block);
    return next;
  }

  /// Waits for a slab's products, and takes them by take(i). Between two slabs' products nothing
  /// else is done: beyond 500 cycles the tensor cores would wait (H100).
  template <class Take>
  CUTLASS_DEVICE void finish_slab(float (&sum)[kValues], const Take& take) {
    wait_for(sum);
    slabs_.arrive(leaving_);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kValues; ++i) take(i);
  }

  /// Two planes: v += `left` steps of a chunk, from slab `slab` on, which `these` are of.
  CUTLASS_DEVICE void add_slabs(float (&v)[kValues], Slab these, int32_t slab, int32_t left,
                                uint32_t patch, int32_t m_block) {
#pragma unroll 1
    while (left >= kSlabSteps) {
      float sum[kValues];
      issue<0, kSlabSteps, kSlabSteps, 3>(sum, these);
      const float factor = slab % 3 == 0 ? p_.promotion : p_.promotion2;
      ++slab;
      left -= kSlabSteps;
      these = meanwhile_find(slab, left, patch, m_block);
      finish_slab(sum, [&](int i) { v[i] = fmaf(sum[i], factor, v[i]); });
    }
    const auto rest = [&](auto counted) {
      constexpr int kCount = decltype(counted)::value;
      float sum[kValues];
      issue<0, kCount, kCount, 3>(sum, these);
      const float factor = slab % 3 == 0 ? p_.promotion : p_.promotion2;
      meanwhile_find(0, 0, patch, m_block);
      finish_slab(sum, [&](int i) { v[i] = fmaf(sum[i], factor, v[i]); });
    };
    static_assert(kSlabSteps == 4);
    switch (left) {
      case 1:
        return rest(cute::Int<1>{});
      case 2:
        return rest(cute::Int<2>{});
      case 3:
        return rest(cute::Int<3>{});
      default:
        return;
    }
  }

  /// v += a chunk's steps where sums are short, so that single truncations show: the fourth product
  /// is added, and one or two steps of the large one are promoted at once.
  CUTLASS_DEVICE void add_short(float (&v)[kValues], int32_t slab, int32_t left, uint32_t patch,
                                int32_t m_block) {
#pragma unroll 1
    for (; left > 0; ++slab, left -= kSlabSteps) {
      slabs_.refill();
      add_short(v, steps_of(slab, kSlabSteps, patch, m_block), min(left, kSlabSteps));
      slabs_.release();
    }
  }

  CUTLASS_DEVICE void add_short(float (&v)[kValues], Steps steps, int32_t count) {
    const auto slab = [&](auto counted) {
      constexpr int kCount = decltype(counted)::value;
      constexpr int kTwo = std::min(kCount, 2);
      if (p_.steps_at_once == 2) {
        promote<0, kTwo, kCount>(v, steps);
        if constexpr (kCount > kTwo) promote<kTwo, kCount, 0>(v, steps);
      } else {
        promote<0, 1, kCount>(v, steps);
#pragma unroll 1
        for (int i = 1; i < kCount; ++i) {
          steps.next();
          promote<0, 1, 0>(v, steps);
        }
      }
    };
    static_assert(kSlabSteps == 4);
    switch (count) {
      case 1:
        slab(cute::Int<1>{});
        break;
      case 2:
        slab(cute::Int<2>{});
        break;
      case 3:
        slab(cute::Int<3>{});
        break;
      default:
        slab(cute::Int<4>{});
        break;
    }
  }

  /// v = the sum of all steps, whose weights stay. The small products of all of them come first, in
  /// v itself: it truncates at their size. The large ones are promoted to it, 64 pixels at a time.
  CUTLASS_DEVICE void multiply_in_parts(float (&v)[kValues], uint32_t patch, int32_t m_block) {
    const int32_t count = p_.chunk_steps[0];
    Steps steps = steps_of(0, count, patch, m_block);
    const uint32_t low_weight = plane_bytes() >> 4;
    const uint32_t low_patch = uint32_t(p_.shared.plane_bytes) >> 4;
    const auto add_small = [&](auto lowest) {
      const auto step = [&](int at, bool add) {
        Mma::run(v, steps.weight(at) + low_weight, steps.pixels(at), add);
        Mma::run(v, steps.weight(at), steps.pixels(at) + low_patch, true);
        if constexpr (decltype(lowest)::value) {
          Mma::run(v, steps.weight(at) + low_weight, steps.pixels(at) + low_patch, true);
        }
      };
      fence(v);
      cute::warpgroup_arrive();
      step(0, false);
      cute::warpgroup_commit_batch();
      int32_t i = 1;
#pragma unroll 1
      for (; i + 1 < count; i += 2) {
        cute::warpgroup_arrive();
        step(i, true);
        step(i + 1, true);
        cute::warpgroup_commit_batch();
      }
      if (i < count) {
        cute::warpgroup_arrive();
        step(i, true);
        cute::warpgroup_commit_batch();
      }
      cute::warpgroup_wait<0>();
      fence(v);
    };
    const int32_t at_once = p_.steps_at_once;
    if (at_once == 1) {
      add_small(std::true_type{});
    } else {
      add_small(std::false_type{});
    }
#pragma unroll 1
    for (int32_t done = 0; done < count; done += at_once, steps.next(at_once)) {
      const bool second = at_once == kSlabSteps && done / kSlabSteps % 3 != 0;
      const float factor = at_once == 1 ? 1.f : second ? p_.promotion2 : p_.promotion;
      switch (min(count - done, at_once)) {
        case 1:
          promote_parts<1>(v, steps, factor);
          break;
        case 2:
          promote_parts<2>(v, steps, factor);
          break;
        case 3:
          promote_parts<3>(v, steps, factor);
          break;
        default:
          promote_parts<4>(v, steps, factor);
          break;
      }
    }
  }

  /// v += factor * the large products of kCount steps.
  template <int kCount>
  CUTLASS_DEVICE static void promote_parts(float (&v)[kValues], const Steps& steps, float factor) {
    constexpr int kPart = 64;  // pixels
    CUTLASS_PRAGMA_UNROLL
    for (int part = 0; part < kN / kPart; ++part) {
      float sum[kPart / 2];
      fence(sum);
      cute::warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        Instruction<kPart, Element>::run(sum, steps.weight(i), steps.pixels(i) + part * kPart,
                                         i > 0);
      }
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<0>();
      fence(sum);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPart / 2; ++i) {
        float& to = v[part * (kPart / 2) + i];
        to = fmaf(sum[i], factor, to);
      }
    }
  }

  /// v += `count` steps, one group of instructions for each kSlabSteps of them; v = them, unless
  /// there is something to add to.
  CUTLASS_DEVICE static void add(float (&v)[kValues], Steps steps, int32_t count, bool to) {
#pragma unroll 1
    for (; count >= kSlabSteps; count -= kSlabSteps, to = true) {
      cute::warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSlabSteps; ++i) {
        Mma::run(v, steps.weight(i), steps.pixels(i), i > 0 || to);
      }
      cute::warpgroup_commit_batch();
      steps.next(kSlabSteps);
    }
#pragma unroll 1
    for (; count > 0; --count, to = true) {
      cute::warpgroup_arrive();
      Mma::run(v, steps.weight(0), steps.pixels(0), to);
      cute::warpgroup_commit_batch();
      steps.next();
    }
  }

  /// v += the four small products of the first kSmall steps, then the large ones of kBegin ...
  /// kEnd - 1.
  template <int kBegin, int kEnd, int kSmall>
  CUTLASS_DEVICE void promote(float (&v)[kValues], const Steps& steps) {
    float sum[kValues];
    issue<kBegin, kEnd, kSmall, 4>(sum, steps);
    wait_for(sum);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kValues; ++i) v[i] += sum[i];
  }

  /// The small ones first: the accumulator truncates at the size of what it holds.
  template <int kBegin, int kEnd, int kSmall, int kProducts, class AnySteps>
  CUTLASS_DEVICE void issue(float (&sum)[kValues], const AnySteps& steps) {
    const uint32_t low_weight = plane_bytes() >> 4;
    const uint32_t low_patch = uint32_t(p_.shared.plane_bytes) >> 4;
    if (turns_ == Turns::kOfSums) wait_turn();
    fence(sum);
    cute::warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSmall; ++i) {
      Mma::run(sum, steps.weight(i) + low_weight, steps.pixels(i), i > 0);
      Mma::run(sum, steps.weight(i), steps.pixels(i) + low_patch, true);
      if constexpr (kProducts == 4) {
        Mma::run(sum, steps.weight(i) + low_weight, steps.pixels(i) + low_patch, true);
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = kBegin; i < kEnd; ++i) {
      Mma::run(sum, steps.weight(i), steps.pixels(i), kSmall > 0 || i > kBegin);
    }
    cute::warpgroup_commit_batch();
    if (turns_ == Turns::kOfSums) pass_turn();
  }
};

}  // namespace cutfuse::conv::shift::sm90
