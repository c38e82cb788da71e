/// \file
/// The weight in shared memory, in slabs of four steps.
#pragma once

#include "conv/shift/sm90/layout.cuh"

namespace cutfuse::conv::shift::sm90 {

/// The weight's slabs come through a ring, or stay where all of one (group, m tile) fit in. Thread
/// 0 of the first consumer warpgroup loads them.
class Slabs {
 public:
  CUTLASS_DEVICE Slabs(const Params& params, char* shared)
      : p_(params),
        control_(*reinterpret_cast<Control*>(shared + params.shared.control)),
        slabs_(shared_address(shared) + params.shared.weights) {}

  CUTLASS_DEVICE bool stay() const { return weights_stay(p_.g); }

  /// Before the first tile. A ring is filled ahead over all tiles of this block.
  CUTLASS_DEVICE void start() {
    if (!loads() || stay()) return;
    const Schedule schedule(p_);
    control_.ahead = {schedule, first_of(schedule), 0};
#pragma unroll 1
    for (int32_t slot = 0; slot < p_.g.slab_ring; ++slot) load(slot);
  }

  /// A new (group, m tile) where slabs stay: all of them, after both warpgroups are done with the
  /// old ones.
  CUTLASS_DEVICE void replace(int32_t outer) {
    if (!stay()) return;
    if (loads()) {
#pragma unroll 1
      for (int32_t i = 0; i < p_.g.slabs; ++i) {
        const bool last = i == p_.g.slabs - 1;
        copy(slab_of(outer, i), i, last ? p_.shared.last_slab_bytes : p_.shared.slab_bytes);
      }
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

  /// Shared address of some slab, there or not.
  CUTLASS_DEVICE uint32_t any() const { return slabs_; }

  /// Once for each slab, before it is released: another one takes the place of the slab before it,
  /// which the other warpgroup has likely released too. At best while products are on their way:
  /// all warps of a warpgroup wait for the one that loads.
  CUTLASS_DEVICE void refill() {
    if (stay() || !loads() || (first_ && read_.stage == 0)) return;
    const bool wraps = read_.stage == 0;
    const int32_t slot = wraps ? p_.g.slab_ring - 1 : read_.stage - 1;
    Barrier::wait(&control_.slab_empty[slot], wraps ? read_.phase ^ 1 : read_.phase);
    load(slot);
  }

  /// This warp has read the oldest slab of those that wait() gave.
  CUTLASS_DEVICE void release() {
    __syncwarp();
    arrive(leave());
  }
  /// The same in two parts: what can be done before the slab has been read, and the rest.
  CUTLASS_DEVICE int32_t leave() {
    if (stay()) return -1;
    const int32_t slot = read_.stage;
    read_.next(p_.g.slab_ring);
    first_ = first_ && read_.stage != 0;
    return slot;
  }
  CUTLASS_DEVICE void arrive(int32_t slot) {
    if (slot >= 0 && threadIdx.x % 32 == 0) Barrier::arrive(&control_.slab_empty[slot]);
  }

 private:
  const Params& p_;
  Control& control_;
  uint32_t slabs_;
  Turn turn_;  // where slabs stay, its phase is that of how often they came
  Turn read_;
  bool first_ = true;  // round of the ring; where slabs stay, tile that reads them

  CUTLASS_DEVICE static bool loads() { return threadIdx.x == 0; }

  CUTLASS_DEVICE const char* slab_of(int32_t outer, int32_t slab) const {
    return static_cast<const char*>(p_.packed) +
           (int64_t(outer) * p_.g.slabs + slab) * p_.shared.slab_bytes;
  }
  /// First slab of a tile, or null after the last tile.
  CUTLASS_DEVICE const char* first_of(const Schedule& schedule) const {
    return schedule.more(p_) ? slab_of(schedule.outer(p_), 0) : nullptr;
  }

  /// The next slab of all tiles, if there is one. What follows it is found after the copy began.
  CUTLASS_DEVICE void load(int32_t slot) {
    SlabsAhead& ahead = control_.ahead;
    const char* from = ahead.from;
    if (from == nullptr) return;
    copy(from, slot, p_.shared.slab_bytes);
    ahead.from = from + p_.shared.slab_bytes;
    if (++ahead.slab == p_.g.slabs) {
      ahead.slab = 0;
      ahead.schedule.next(p_);
      ahead.from = first_of(ahead.schedule);
    }
  }

  CUTLASS_DEVICE void copy(const char* from, int32_t slot, uint32_t bytes) {
    TransactionBarrier::arrive_and_expect_tx(&control_.slab_full[slot], bytes);
    const uint32_t barrier = shared_address(&control_.slab_full[slot]);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(slabs_ + slot * p_.shared.slab_bytes),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
  }
};

}  // namespace cutfuse::conv::shift::sm90
