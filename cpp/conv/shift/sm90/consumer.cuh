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
        slabs_(shared + params.shared.weights),
        loads_(threadIdx.x == 0),
        ahead_(params) {}

  CUTLASS_DEVICE bool stay() const { return p_.g.slab_ring >= p_.g.slabs; }

  /// Before the first tile. A ring is filled ahead over all tiles of this block.
  CUTLASS_DEVICE void start() {
    if (!loads_ || stay()) return;
    for (int32_t i = 0; i < p_.g.slab_ring && ahead_.more(); ++i) load();
  }

  /// A new (group, m tile) where slabs stay: all of them, after both warpgroups are done with the
  /// old ones.
  CUTLASS_DEVICE void replace(int32_t outer) {
    if (!stay()) return;
    if (loads_) {
      for (int32_t i = 0; i < p_.g.slabs; ++i) copy(outer, i, i);
    }
    ++uses_;
  }

  /// Shared address of a tile's slab `slab`, once it and those of `steps` steps are there.
  CUTLASS_DEVICE uint32_t wait(int32_t slab, int32_t steps) {
    if (stay()) {
      for (int32_t done = 0; done < steps; done += kSlabSteps) {
        Barrier::wait(&control_.slab_full[slab + done / kSlabSteps], (uses_ - 1) & 1);
      }
      return shared_address(slabs_) + slab * p_.shared.slab_bytes;
    }
    Barrier::wait(&control_.slab_full[turn_.stage], turn_.phase);
    return shared_address(slabs_) + turn_.stage * p_.shared.slab_bytes;
  }

  /// This warp has read the slab that wait() gave last.
  CUTLASS_DEVICE void release() {
    if (stay()) return;
    if (threadIdx.x % 32 == 0) Barrier::arrive(&control_.slab_empty[turn_.stage]);
    // The slot before this one: the other warpgroup is likely done with it.
    if (loads_ && released_ && ahead_.more()) {
      Barrier::wait(&control_.slab_empty[before_.stage], before_.phase);
      load();
    }
    __syncwarp();
    released_ = true;
    before_ = turn_;
    turn_.next(p_.g.slab_ring);
  }

 private:
  const Params& p_;
  Control& control_;
  char* slabs_;
  bool loads_;
  uint32_t uses_ = 0;
  Turn turn_, before_;
  bool released_ = false;
  // The loader's, a ring ahead.
  Schedule ahead_;
  int32_t ahead_slab_ = 0;
  int32_t ahead_slot_ = 0;

  CUTLASS_DEVICE void load() {
    copy(p_.tiles_of_outer.divide(ahead_.index()), ahead_slab_, ahead_slot_);
    if (++ahead_slot_ == p_.g.slab_ring) ahead_slot_ = 0;
    if (++ahead_slab_ == p_.g.slabs) {
      ahead_slab_ = 0;
      ahead_.next();
    }
  }

  CUTLASS_DEVICE void copy(int32_t outer, int32_t slab, int32_t slot) {
    const uint32_t bytes = p_.shared.slab_bytes;
    const char* from =
        static_cast<const char*>(p_.packed) + (int64_t(outer) * p_.g.slabs + slab) * bytes;
    TransactionBarrier::arrive_and_expect_tx(&control_.slab_full[slot], bytes);
    cute::SM90_BULK_COPY_G2S::copy(from, &control_.slab_full[slot], slabs_ + slot * bytes,
                                   int32_t(bytes));
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
        slabs_(slabs) {}

  /// One tile: v is the sum over all chunks for the pixels from `first` of the patch on, scaled by
  /// 2^exponent and the weights'.
  CUTLASS_DEVICE void run(float (&v)[kValues], int32_t& exponent, int32_t first, int32_t m_block) {
    const Geometry& g = p_.g;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kValues; ++i) v[i] = 0.f;
    for (int32_t chunk = 0; chunk < g.chunks; ++chunk, turn_.next(g.stages)) {
      const int32_t stage = turn_.stage;
      Barrier::wait(&control_.full[stage], turn_.phase);
      const int32_t here = control_.exponent[stage];
      const int32_t change = chunk > 0 ? here - exponent : 0;
      if constexpr (kPlanes == 1 && takes_chunks(kN, kPlanes)) rescale(v, change);
      exponent = here;
      const uint32_t patch = patches_ + stage * p_.shared.stage_bytes + first * 16;
      multiply(v, chunk, patch, m_block, change);
      if (threadIdx.x % 32 == 0) Barrier::arrive(&control_.empty[stage]);
    }
  }

 private:
  using Mma = Instruction<kN, Element>;

  const Params& p_;
  Control& control_;
  uint32_t patches_;
  Slabs& slabs_;
  Turn turn_;

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
    const uint32_t step_bytes = kPlanes * p_.g.m_blocks * kTileBytes;
    // Slabs that stay lie one after the other; they are one piece, unless promotion divides it.
    const int32_t piece = kPlanes == 1 && slabs_.stay() ? steps : kSlabSteps;
    for (int32_t done = 0; done < steps; done += piece) {
      const int32_t count = min(steps - done, piece);
      const int32_t slab = first + done / kSlabSteps;
      const uint32_t weights = slabs_.wait(slab, count) + m_block * kTileBytes;
      if constexpr (kPlanes == 1) {
        const uint32_t* words = &p_.steps[slab * kSlabSteps];
        uint32_t a = weight_word(weights);
        uint32_t b = words[0] + (patch >> 4);
        fence(v);
#pragma unroll 1
        for (int32_t i = 1; i <= count; ++i) {
          const uint32_t next = words[i] + (patch >> 4);  // the table has one more
          cute::warpgroup_arrive();
          Mma::run(v, a, b, true);
          cute::warpgroup_commit_batch();
          a += step_bytes >> 4;
          b = next;
        }
        cute::warpgroup_wait<0>();
        fence(v);
      } else {
        float sum[kValues];
        products(sum, slab, count, weights, patch);
        const float factor = slab % 3 == 0 ? p_.promotion : p_.promotion2;
        const float keep = done == 0 ? power_of_two(max(min(change, 126), -126)) : 1.f;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kValues; ++i) v[i] = fmaf(sum[i], factor, keep * v[i]);
      }
      slabs_.release();
    }
  }

  /// sum = the products of one slab at ieee, the small ones first.
  CUTLASS_DEVICE void products(float (&sum)[kValues], int32_t slab, int32_t count, uint32_t weights,
                               uint32_t patch) {
    const uint32_t step_bytes = kPlanes * p_.g.m_blocks * kTileBytes;
    const uint32_t low_weights = weights + p_.g.m_blocks * kTileBytes;
    const uint32_t low_patch = patch + p_.shared.plane_bytes;
    const uint32_t* words = &p_.steps[slab * kSlabSteps];
    const auto add = [&](uint32_t weight, uint32_t from, bool first) {
      uint32_t a = weight_word(weight);
      uint32_t b = words[0] + (from >> 4);
#pragma unroll 1
      for (int32_t i = 1; i <= count; ++i) {
        const uint32_t next = words[i] + (from >> 4);  // the table has one more
        cute::warpgroup_arrive();
        Mma::run(sum, a, b, !first || i > 1);
        cute::warpgroup_commit_batch();
        a += step_bytes >> 4;
        b = next;
      }
    };
    fence(sum);
    add(low_weights, patch, true);
    if (p_.four_products) add(low_weights, low_patch, false);
    add(weights, low_patch, false);
    add(weights, patch, false);
    cute::warpgroup_wait<0>();
    fence(sum);
  }
};

}  // namespace cutfuse::conv::shift::sm90
