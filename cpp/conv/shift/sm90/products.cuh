/// \file
/// Products of two planes, ieee: the accumulator is promoted to a second fp32 register set every
/// slab (64 of K), as in gemm/sm90/mainloop.cuh, or sooner. Tiles of 256 pixels have no registers
/// for a second set: multiply_in_parts.
#pragma once

#include "conv/shift/sm90/slabs.cuh"

namespace cutfuse::conv::shift::sm90 {

/// What the two warpgroups that multiply share, of one plane too: weights, and turns.
template <int kN, int kPlanes, class Element>
class Products {
 public:
  static constexpr int kValues = kN / 2;

  /// After begin() without a tile.
  CUTLASS_DEVICE static void wait_for(float (&sum)[kValues]) {
    cute::warpgroup_wait<0>();
    fence(sum);
  }

 protected:
  using Mma = Instruction<kN, Element>;

  CUTLASS_DEVICE Products(const Params& params, char* shared)
      : p_(params), slabs_(params, shared), turns_(params.turns) {
    if (turns_ != Turns::kNone && threadIdx.x >= 128) pass_turn();
    slabs_.start();
  }

  const Params& p_;
  Slabs slabs_;
  Turns turns_;
  int32_t first_step_ = 0;  // of those of the present block

  /// Of a step's weights.
  CUTLASS_DEVICE uint32_t plane_bytes() const { return p_.g.weight_rows * kRowStepBytes; }

  /// By which a slab's sum is promoted, in turn as in gemm/sm90/mainloop.cuh.
  CUTLASS_DEVICE float factor_of(int32_t slab) const {
    return slab % 3 == 0 ? p_.promotion : p_.promotion2;
  }

  CUTLASS_DEVICE static void wait_turn() {
    cutlass::arch::NamedBarrier::sync(kConsumers, kTurnBarrier + threadIdx.x / 128);
  }
  CUTLASS_DEVICE static void pass_turn() {
    cutlass::arch::NamedBarrier::arrive(kConsumers, kTurnBarrier + (1 - threadIdx.x / 128));
  }

  /// Where the weights of steps lie that follow each other.
  struct Weights {
    uint32_t a, a_stride;

    CUTLASS_DEVICE uint32_t weight(int step) const { return a + step * a_stride; }
  };

  CUTLASS_DEVICE Weights weights_at(uint32_t address, int32_t m_block) const {
    return {operand_word(address + m_block * 64 * 16, plane_bytes() / 2),
            kPlanes * plane_bytes() >> 4};
  }

  /// The steps of a slab, or of several that lie one after the other: their weights, and the
  /// patch's words. Instructions that follow each other without a loop cost a third of its issue
  /// slots.
  struct Steps : Weights {
    const uint32_t* words;
    uint32_t patch;

    CUTLASS_DEVICE uint32_t pixels(int step) const { return words[step] + patch; }
    CUTLASS_DEVICE void next(int count = 1) {
      this->a += count * this->a_stride;
      words += count;
    }
  };

  /// Waits for the slabs of `count` steps, from slab `slab` on.
  CUTLASS_DEVICE Steps steps_of(int32_t slab, int32_t count, uint32_t patch, int32_t m_block) {
    return {weights_at(slabs_.wait(slab, count), m_block),
            &p_.steps[first_step_ + slab * kSlabSteps], patch >> 4};
  }

  /// A slab's four steps, found while products of another run.
  struct Slab : Weights {
    uint32_t b[kSlabSteps];

    CUTLASS_DEVICE uint32_t pixels(int step) const { return b[step]; }
  };

  CUTLASS_DEVICE Slab slab_at(uint32_t address, int32_t slab, uint32_t patch,
                              int32_t m_block) const {
    Slab found{weights_at(address, m_block), {}};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSlabSteps; ++i) {
      found.b[i] = p_.steps[first_step_ + slab * kSlabSteps + i] + (patch >> 4);
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
      const float factor = factor_of(slab);
      ++slab;
      left -= kSlabSteps;
      these = meanwhile_find(slab, left, patch, m_block);
      finish_slab(sum, [&](int i) { v[i] = fmaf(sum[i], factor, v[i]); });
    }
    const auto rest = [&](auto counted) {
      constexpr int kCount = decltype(counted)::value;
      float sum[kValues];
      issue<0, kCount, kCount, 3>(sum, these);
      const float factor = factor_of(slab);
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
  template <class Meanwhile>
  CUTLASS_DEVICE void multiply_in_parts(float (&v)[kValues], uint32_t patch, int32_t m_block,
                                        const Meanwhile& meanwhile) {
    const int32_t count = p_.chunk_steps[0];
    Steps steps = steps_of(0, count, patch, m_block);
    // So that the compiler knows it to be the same in all lanes, as descriptors are: 3 % of batch
    // norm's convolution at ieee in training (H200).
    __syncwarp();
    steps.patch = __shfl_sync(0xffffffffu, steps.patch, 0);
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
      meanwhile();
      int32_t i = 1;
#pragma unroll 1
      for (; i + 1 < count; i += 2) {
        cute::warpgroup_arrive();
        step(i, true);
        step(i + 1, true);
        cute::warpgroup_commit_batch();
        meanwhile();
      }
      if (i < count) {
        cute::warpgroup_arrive();
        step(i, true);
        cute::warpgroup_commit_batch();
      }
      meanwhile();
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
      const float factor = at_once == 1            ? 1.f
                           : at_once == kSlabSteps ? factor_of(done / kSlabSteps)
                                                   : p_.promotion;
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

 private:
  int32_t leaving_ = -1;  // slot of the slab whose products are on their way
};

}  // namespace cutfuse::conv::shift::sm90
