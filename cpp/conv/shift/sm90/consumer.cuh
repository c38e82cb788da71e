/// \file
/// Multiplies: every filter tap reads the same patch, shifted. At ieee the accumulator is promoted
/// to a second fp32 register set every slab (64 of K), as in gemm/sm90/mainloop.cuh.
#pragma once

#include "conv/shift/sm90/layout.cuh"
#include "program/fold.cuh"

namespace cutfuse::conv::shift::sm90 {

/// The weight's slabs come through a ring, or stay where all of one (group, m tile) fit in. Thread
/// 0 of the first consumer warpgroup loads them.
class Slabs {
 public:
  CUTLASS_DEVICE Slabs(const Params& params, char* shared)
      : p_(params),
        control_(*reinterpret_cast<Control*>(shared + params.shared.control)),
        slabs_(shared_address(shared) + params.shared.weights) {}

  CUTLASS_DEVICE bool stay() const { return p_.g.slab_ring >= p_.g.slabs; }

  /// Before the first tile. A ring is filled ahead over all tiles of this block.
  CUTLASS_DEVICE void start() {
    if (!loads() || stay()) return;
    control_.ahead = {Schedule(p_), 0, 0};
#pragma unroll 1
    for (int32_t i = 0; i < p_.g.slab_ring; ++i) load();
  }

  /// A new (group, m tile) where slabs stay: all of them, after both warpgroups are done with the
  /// old ones.
  CUTLASS_DEVICE void replace(int32_t outer) {
    if (!stay()) return;
    if (loads()) {
#pragma unroll 1
      for (int32_t i = 0; i < p_.g.slabs; ++i) copy(outer, i, i);
    }
    turn_.phase ^= 1;
    first_ = true;
  }

  /// A tile is done.
  CUTLASS_DEVICE void finish_tile() {
    if (stay()) first_ = false;
  }

  /// Shared address of a tile's slab `slab`, once it and those of `steps` steps are there.
  CUTLASS_DEVICE uint32_t wait(int32_t slab, int32_t steps) {
    if (stay()) {
#pragma unroll 1
      for (int32_t done = 0; first_ && done < steps; done += kSlabSteps) {
        Barrier::wait(&control_.slab_full[slab + done / kSlabSteps], turn_.phase ^ 1);
      }
      return slabs_ + slab * p_.shared.slab_bytes;
    }
    const int32_t slot = turn_.stage;
    Barrier::wait(&control_.slab_full[slot], turn_.phase);
    turn_.next(p_.g.slab_ring);
    return slabs_ + slot * p_.shared.slab_bytes;
  }

  /// This warp has read the oldest slab of those that wait() gave.
  CUTLASS_DEVICE void release() {
    if (stay()) return;
    if (threadIdx.x % 32 == 0) Barrier::arrive(&control_.slab_empty[read_.stage]);
    // The slot before this one: the other warpgroup is likely done with it.
    if (loads() && !(first_ && read_.stage == 0)) {
      const bool wraps = read_.stage == 0;
      Barrier::wait(&control_.slab_empty[wraps ? p_.g.slab_ring - 1 : read_.stage - 1],
                    wraps ? read_.phase ^ 1 : read_.phase);
      load();
    }
    __syncwarp();
    read_.next(p_.g.slab_ring);
    first_ = first_ && read_.stage != 0;
  }

 private:
  const Params& p_;
  Control& control_;
  uint32_t slabs_;
  Turn turn_;  // where slabs stay, its phase is that of how often they came
  Turn read_;
  bool first_ = true;  // round of the ring; where slabs stay, tile that reads them

  CUTLASS_DEVICE static bool loads() { return threadIdx.x == 0; }

  /// The next slab of all tiles, if there is one.
  CUTLASS_DEVICE void load() {
    SlabsAhead& ahead = control_.ahead;
    if (!ahead.schedule.more(p_)) return;
    copy(p_.tiles_of_outer.divide(ahead.schedule.index()), ahead.slab, ahead.slot);
    if (++ahead.slot == p_.g.slab_ring) ahead.slot = 0;
    if (++ahead.slab == p_.g.slabs) {
      ahead.slab = 0;
      ahead.schedule.next(p_);
    }
  }

  CUTLASS_DEVICE void copy(int32_t outer, int32_t slab, int32_t slot) {
    const uint32_t bytes = p_.shared.slab_bytes;
    const char* from =
        static_cast<const char*>(p_.packed) + (int64_t(outer) * p_.g.slabs + slab) * bytes;
    TransactionBarrier::arrive_and_expect_tx(&control_.slab_full[slot], bytes);
    const uint32_t barrier = shared_address(&control_.slab_full[slot]);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(slabs_ + slot * bytes),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
  }
};

template <int kN, int kPlanes, class Element>
class Multiplier {
 public:
  static constexpr int kValues = kN / 2;

  CUTLASS_DEVICE Multiplier(const Params& params, char* shared, Slabs& slabs)
      : p_(params),
        control_(*reinterpret_cast<Control*>(shared + params.shared.control)),
        patches_(shared_address(shared) + params.shared.patch),
        slabs_(slabs),
        takes_turns_(kPlanes == 1 && params.takes_turns) {
    if (takes_turns_ && threadIdx.x >= 128) pass_turn();
  }

  /// Waits for the next tile's patch, or for its first chunk of channels.
  CUTLASS_DEVICE const PatchInfo& next() {
    Barrier::wait(&control_.full[turn_.stage], turn_.phase);
    return control_.info[turn_.stage];
  }

  /// After next(): v is the sum over all chunks for the pixels from `first` of the patch on, scaled
  /// by 2^exponent and the weights'. Returns whether all of x was finite.
  CUTLASS_DEVICE bool run(float (&v)[kValues], int32_t& exponent, int32_t first, int32_t m_block) {
    const Geometry& g = p_.g;
    bool finite = true;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kValues; ++i) v[i] = 0.f;
    for (int32_t chunk = 0; chunk < g.chunks; ++chunk, turn_.next(g.stages)) {
      const int32_t stage = turn_.stage;
      if (chunk > 0) Barrier::wait(&control_.full[stage], turn_.phase);
      const int32_t here = control_.info[stage].exponent;
      finite = finite && control_.info[stage].finite;
      const int32_t change = chunk > 0 ? here - exponent : 0;
      if constexpr (kPlanes == 1 && takes_chunks(kN, kPlanes)) rescale(v, change);
      exponent = here;
      const uint32_t patch = patches_ + stage * p_.shared.stage_bytes + first * 16;
      wait_turn();
      multiply(v, chunk, patch, m_block, change);
      pass_turn();
      __syncwarp();
      if (threadIdx.x % 32 == 0) Barrier::arrive(&control_.empty[stage]);
    }
    slabs_.finish_tile();
    return finite;
  }

  /// After the last tile: the other warpgroup's turn has been passed once more than it waits.
  CUTLASS_DEVICE void finish() {
    if (threadIdx.x < 128) wait_turn();
  }

 private:
  using Mma = Instruction<kN, Element>;

  const Params& p_;
  Control& control_;
  uint32_t patches_;
  Slabs& slabs_;
  Turn turn_;
  bool takes_turns_;

  /// Of a step's weights.
  CUTLASS_DEVICE uint32_t plane_bytes() const { return p_.g.weight_rows * kRowStepBytes; }

  /// One warpgroup multiplies while the other stores.
  CUTLASS_DEVICE void wait_turn() {
    if (takes_turns_)
      cutlass::arch::NamedBarrier::sync(kConsumers, kTurnBarrier + threadIdx.x / 128);
  }
  CUTLASS_DEVICE void pass_turn() {
    if (takes_turns_) {
      cutlass::arch::NamedBarrier::arrive(kConsumers, kTurnBarrier + (1 - threadIdx.x / 128));
    }
  }

  /// v *= 2^e. Without a branch, for which the compiler would serialise wgmma.
  CUTLASS_DEVICE static void rescale(float (&v)[kValues], int32_t e) {
    const float factor = power_of_two(max(min(e, 126), -126));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kValues; ++i) v[i] *= factor;
  }

  CUTLASS_DEVICE void multiply(float (&v)[kValues], int32_t chunk, uint32_t patch, int32_t m_block,
                               int32_t change) {
    const int32_t first = p_.chunk_slab[chunk];
    const int32_t steps = p_.chunk_steps[chunk];
    const uint32_t step_bytes = kPlanes * plane_bytes();
    // Slabs that stay lie one after the other; they are one piece, unless promotion divides it.
    const int32_t piece = kPlanes == 1 && slabs_.stay() ? steps : kSlabSteps;
    if constexpr (kPlanes == 1) fence(v);
    int32_t held = 0;  // slabs not yet released
    for (int32_t done = 0; done < steps; done += piece) {
      const int32_t count = min(steps - done, piece);
      const int32_t slab = first + done / kSlabSteps;
      const uint32_t weights = slabs_.wait(slab, count) + m_block * 64 * 16;
      if constexpr (kPlanes == 1) {
        const uint32_t* words = &p_.steps[slab * kSlabSteps];
        uint32_t a = operand_word(weights, plane_bytes() / 2);
        uint32_t b = words[0] + (patch >> 4);
#pragma unroll 1
        for (int32_t i = 1; i <= count; ++i) {
          const uint32_t next = words[i] + (patch >> 4);  // the table has one more
          cute::warpgroup_arrive();
          Mma::run(v, a, b, true);
          cute::warpgroup_commit_batch();
          a += step_bytes >> 4;
          b = next;
        }
        ++held;
        if (held > 1 && count == kSlabSteps) {  // then those before are done
          cute::warpgroup_wait<kSlabSteps>();
          slabs_.release();
          --held;
        }
      } else {
        const float keep = done == 0 ? power_of_two(max(min(change, 126), -126)) : 1.f;
        multiply_planes(v, slab, count, weights, patch, keep);
        slabs_.release();
      }
    }
    if constexpr (kPlanes == 1) {
      cute::warpgroup_wait<0>();
      fence(v);
#pragma unroll 1
      for (; held > 0; --held) slabs_.release();
    }
  }

  /// v = keep * v + one slab's products at ieee. The small ones come first, as the accumulator
  /// truncates at the size of what it holds. In short sums single truncations show: there the
  /// fourth product is added and each step of the large one promoted alone. One loop serves both:
  /// wgmma in branches would be serialised.
  CUTLASS_DEVICE void multiply_planes(float (&v)[kValues], int32_t slab, int32_t count,
                                      uint32_t weights, uint32_t patch, float keep) {
    const bool four = p_.four_products;
    const uint32_t low_weights = weights + plane_bytes();
    const uint32_t low_patch = patch + p_.shared.plane_bytes;
    const int32_t rounds = four ? count + 1 : 1;
    const float factor = four ? 1.f : slab % 3 == 0 ? p_.promotion : p_.promotion2;
#pragma unroll 1
    for (int32_t round = 0; round < rounds; ++round) {
      const int32_t cross = round == 0 ? count : 0;
      float sum[kValues];
      bool started = false;
      fence(sum);
      add(sum, started, slab, 0, cross, low_weights, patch);
      add(sum, started, slab, 0, four ? cross : 0, low_weights, low_patch);
      add(sum, started, slab, 0, cross, weights, low_patch);
      add(sum, started, slab, max(round - 1, 0), four ? round : count, weights, patch);
      cute::warpgroup_wait<0>();
      fence(sum);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kValues; ++i) v[i] = fmaf(sum[i], factor, keep * v[i]);
      keep = 1.f;
    }
  }

  /// sum (+)= weights at `weight` times the patch at `from`, steps begin ... end - 1 of a slab.
  CUTLASS_DEVICE void add(float (&sum)[kValues], bool& started, int32_t slab, int32_t begin,
                          int32_t end, uint32_t weight, uint32_t from) {
    const uint32_t step_bytes = kPlanes * plane_bytes();
    const uint32_t* words = &p_.steps[slab * kSlabSteps];
    uint32_t a = operand_word(weight + begin * step_bytes, plane_bytes() / 2);
    uint32_t b = words[begin] + (from >> 4);
#pragma unroll 1
    for (int32_t i = begin + 1; i <= end; ++i) {
      const uint32_t next = words[i] + (from >> 4);  // the table has one more
      cute::warpgroup_arrive();
      Mma::run(sum, a, b, started);
      cute::warpgroup_commit_batch();
      started = true;
      a += step_bytes >> 4;
      b = next;
    }
  }
};

}  // namespace cutfuse::conv::shift::sm90
