/// \file
/// Multiplies: every filter tap reads the same patch, shifted.
#pragma once

#include "conv/shift/sm90/products.cuh"
#include "program/fold.cuh"

namespace cutfuse::conv::shift::sm90 {

/// Where a block begins: its first pixel in the patch, and its first step; in a ring there are
/// steps for each row.
struct First {
  int32_t pixel = 0, step = 0;

  template <bool kRings>
  CUTLASS_DEVICE static First of(const PatchInfo& info, int32_t number) {
    First first;
    first.pixel = max(info.offset[number], 0);
    if constexpr (kRings) first.step = info.steps[number];
    return first;
  }
};

template <int kN, int kPlanes, class Element>
class Multiplier : public Products<kN, kPlanes, Element> {
  using Base = Products<kN, kPlanes, Element>;

 public:
  using Base::kValues;

  CUTLASS_DEVICE Multiplier(const Params& params, char* shared)
      : Base(params, shared),
        control_(*reinterpret_cast<Control*>(shared + params.shared.control)),
        patches_(shared_address(shared) + params.shared.patch) {}

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

  /// After next(): v is the sum over all chunks for the pixels from `first` on, scaled by
  /// 2^exponent and the weights'. Returns whether all of x was finite. Calls
  /// meanwhile() while products are on their way: of one plane once, in parts between some.
  /// kChunks: there may be several.
  template <bool kChunks, class Meanwhile>
  CUTLASS_DEVICE bool run(float (&v)[kValues], int32_t& exponent, const First& first,
                          int32_t m_block, const Meanwhile& meanwhile) {
    this->first_step_ = first.step;
    if constexpr (kPlanes == 2 && !kInParts) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kValues; ++i) v[i] = 0.f;
    }
    return for_chunks<kChunks>(0, exponent, true, [&](int32_t chunk, int32_t change) {
      if constexpr (kPlanes == 1 && kChunks) rescale(v, change);
      const bool of_issues = kPlanes == 1 && turns_ == Turns::kOfIssues;
      if (turns_ == Turns::kOfTiles || of_issues) this->wait_turn();
      if constexpr (kInParts) {
        this->multiply_in_parts(v, patch_at(first), m_block, meanwhile);
      } else if constexpr (kPlanes == 2) {
        if (change != 0) rescale(v, change);
        this->add_short(v, p_.chunk_slab[chunk], p_.chunk_steps[chunk], patch_at(first), m_block);
      } else {
        multiply(v, chunk, patch_at(first), m_block, meanwhile);
      }
      if (turns_ == Turns::kOfTiles) this->pass_turn();
    });
  }

  /// After next(), where sums at ieee are long: the products of the tile's first slab are on their
  /// way to `sum`, until finish_begun(). Without a tile, those of whatever is there: a branch would
  /// serialise wgmma.
  CUTLASS_DEVICE void begin(float (&sum)[kValues], bool tile, const First& first, int32_t m_block) {
    const uint32_t weights = tile ? slabs_.wait(0, kSlabSteps) : slabs_.any();
    this->first_step_ = first.step;
    this->template issue<0, kSlabSteps, kSlabSteps, 3>(
        sum, this->slab_at(weights, 0, patch_at(first), m_block));
  }

  /// After begin(): as run().
  CUTLASS_DEVICE bool finish_begun(float (&v)[kValues], float (&sum)[kValues], int32_t& exponent,
                                   const First& first, int32_t m_block) {
    const int32_t left = p_.chunk_steps[0] - kSlabSteps;
    const uint32_t patch = patch_at(first);
    const Slab next = this->meanwhile_find(1, left, patch, m_block);
    this->finish_slab(sum, [&](int i) { v[i] = sum[i] * p_.promotion; });
    this->add_slabs(v, next, 1, left, patch, m_block);
    const PatchInfo& info = info_of(control_, turn_);
    exponent = info.exponent;
    const bool finite = info.finite;
    finish_chunk();
    return for_chunks<true>(1, exponent, finite, [&](int32_t chunk, int32_t change) {
      if (change != 0) rescale(v, change);
      const int32_t slab = p_.chunk_slab[chunk];
      const uint32_t patch = patch_at(first);
      this->add_slabs(v, this->slab_of(slab, patch, m_block), slab, p_.chunk_steps[chunk], patch,
                      m_block);
    });
  }

  /// After the last tile: the other warpgroup's turn has been passed once more than it waits.
  CUTLASS_DEVICE void finish() {
    if (turns_ != Turns::kNone && threadIdx.x < 128) this->wait_turn();
  }

 private:
  static constexpr bool kInParts = in_parts(kN, kPlanes);
  using Base::p_;
  using Base::slabs_;
  using Base::turns_;
  using typename Base::Mma;
  using typename Base::Slab;
  using typename Base::Steps;

  Control& control_;
  uint32_t patches_;
  Turn turn_;

  /// body(chunk, by how much its exponent differs from the one before) for the chunks of a tile
  /// from `begin` on; 0: of the first one by nothing. Returns whether all of x was finite.
  template <bool kChunks, class Body>
  CUTLASS_DEVICE bool for_chunks(int32_t begin, int32_t& exponent, bool finite, const Body& body) {
    // Without the loop where there is one chunk: in it the compiler would serialise wgmma.
    const int32_t chunks = kChunks ? p_.g.chunks : 1;
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

  /// Of the present stage.
  CUTLASS_DEVICE uint32_t patch_at(const First& first) const {
    return patches_ + turn_.stage * p_.shared.stage_bytes + first.pixel * 16;
  }

  /// v *= 2^e. One plane's v is the accumulator: a branch would serialise wgmma.
  CUTLASS_DEVICE static void rescale(float (&v)[kValues], int32_t e) {
    const float factor = power_of_two(max(min(e, 126), -126));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kValues; ++i) v[i] *= factor;
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
      add(v, this->steps_of(first + done / kSlabSteps, count, patch, m_block), count,
          chunk > 0 || done > 0);
      ++held;
      if (held > 1 && count == kSlabSteps) {  // then those before are done
        cute::warpgroup_wait<1>();
        slabs_.refill();
        slabs_.release();
        --held;
      }
    }
    if (turns_ == Turns::kOfIssues) this->pass_turn();  // the other's products queue behind these
    if (chunk == 0) meanwhile();
    cute::warpgroup_wait<0>();
    fence(v);
#pragma unroll 1
    for (; held > 0; --held) {
      slabs_.refill();
      slabs_.release();
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
};

}  // namespace cutfuse::conv::shift::sm90
