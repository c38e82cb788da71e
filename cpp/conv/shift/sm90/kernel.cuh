/// \file
/// The shift kernel: a convolution straight from NCHW. Two warpgroups read and convert patches of
/// the image, two multiply them by the weights and store, over a ring of patches in shared memory.
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/numeric_types.h>

#include <type_traits>

#include "conv/shift/sm90/consumer.cuh"
#include "conv/shift/sm90/epilogue.cuh"
#include "conv/shift/sm90/producer.cuh"
#include "core/launch.h"

namespace cutfuse::conv::shift::sm90 {

/// Registers of a thread. Together no more than the kernel is launched with, 168 or 128 each: else
/// they would wait forever.
template <int kN, int kPlanes>
struct Registers {
  static constexpr bool kWide = producers(kN, kPlanes) == 128;
  static constexpr uint32_t kProducer = !kWide ? 80 : in_parts(kN, kPlanes) ? 72 : 88;
  static constexpr uint32_t kConsumer = kWide ? 252 - kProducer / 2 : 256 - kProducer;
  static_assert((kWide ? 1 : 2) * kProducer + 2 * kConsumer <= (kWide ? 3 * 168 : 4 * 128));
};

CUTLASS_DEVICE void prepare_control(const Params& p, char* shared, int producer_warps) {
  auto& control = *reinterpret_cast<Control*>(shared + p.shared.control);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMaxStages; ++i) {
      Barrier::init(&control.full[i], kMaxTileBlocks);
      Barrier::init(&control.empty[i], kConsumerWarps);
    }
    for (int i = 0; i < min(p.g.slab_ring, p.g.slabs); ++i) {
      Barrier::init(&control.slab_full[i], 1);
      Barrier::init(&control.slab_empty[i], kConsumerWarps);
    }
    for (int i = 0; i < kMaxPieces; ++i) {
      Barrier::init(&control.piece_full[i], 1);
      Barrier::init(&control.piece_empty[i], producer_warps - 1);
    }
    for (int i = 0; i < 3; ++i) control.largest[i] = 0;
    cutlass::arch::fence_barrier_init();
  }
  Lanes(p, shared).prepare(p);
  clear_guards(p, shared);
}

/// Folds the program's affine steps for the rows of one (group, m tile).
CUTLASS_DEVICE void prepare_rows(const Params& p, char* shared, const TileOf& tile) {
  auto* rows = reinterpret_cast<RowConstants*>(shared + p.shared.rows);
  const int32_t count = p.g.weight_rows;
  const int32_t outer = tile.group * p.g.m_tiles + tile.m_tile;
  for (int32_t row = threadIdx.x; row < count; row += kConsumers) {
    const int32_t channel = channel_of_row(p.g, tile.m_tile, row);
    RowConstants constants{0.f, 0.f, 0, 1};
    if (channel >= 0) {
      const int64_t index = p.phases_made.divide(tile.group * p.g.out_channels + channel);
      const RowExponent exponent{p.exponents[outer * count + row]};
      constants.exponent = exponent.exponent();
      const FoldedColumn folded =
          fold(p.program, p.affine_steps, constants.exponent, [&](int operand) {
            const Operand& o = p.program.operands[operand];
            return load_value(o.data, index * o.row_stride, o.dtype);
          });
      constants.scale = folded.scale;
      constants.shift = folded.shift;
      constants.plain = folded.plain && exponent.finite();
    }
    rows[row] = constants;
  }
}

template <int kN, int kPlanes, class Element, Role kRole>
class Consumer {
 public:
  CUTLASS_DEVICE Consumer(const Params& p, char* shared)
      : p_(p),
        shared_(shared),
        multiplier_(p, shared),
        epilogue_(p, shared),
        block_number_(p.g.tile_blocks == 2 ? warpgroup() : 0),
        tile_{0, 0, 0, p.g.m_blocks == 2 ? warpgroup() : 0} {
    enter(Schedule(p).outer(p));
  }

  CUTLASS_DEVICE void run() {
    // In strips the producers wait for the patch: nothing is done before it is released.
    constexpr bool kMeanwhile = kRole == Role::kStore && (kPlanes == 1 || kInParts);
    // One plane is rescaled for each chunk: a twentieth of all instructions, where there is one.
    constexpr bool kChunks = takes_chunks(kN);
    if (kChunks && (kPlanes == 2 || p_.g.chunks > 1)) return run_tiles<false, kChunks>();
    if (kMeanwhile && (kN == 256 || p_.g.strip == 0)) return run_tiles<kMeanwhile, false>();
    if constexpr (!kMeanwhile || kN < 256) run_tiles<false, false>();
  }

  /// The same where sums at ieee are long; a tile's first products run while the one before it is
  /// stored, if that leaves them registers.
  CUTLASS_DEVICE void run_ahead() {
    constexpr bool kAhead = kRole == Role::kStore || kRole == Role::kStatistics;
    const auto nothing = [] {};
    const auto first_of = [&](const PatchInfo& info) {
      return First::of<takes_rings(kN)>(info, block_number_);
    };
    float sum[kN / 2];
    First first = first_of(multiplier_.next(nothing));
    multiplier_.begin(sum, true, first, tile_.m_block);
    for (int32_t left = Schedule::count(p_); left > 0; --left) {
      float v[kN / 2];
      int32_t exponent = 0;
      const bool finite = multiplier_.finish_begun(v, sum, exponent, first, tile_.m_block);
      const PatchInfo& info = multiplier_.last();
      const bool more = left > 1;
      int32_t outer = outer_;
      const auto find_next = [&] {
        if (!more) return;
        const PatchInfo& next = multiplier_.next(nothing);
        first = first_of(next);
        outer = next.outer;
      };
      if constexpr (kAhead) {
        find_next();
        // Weights that stay are replaced between tiles of different ones: then it begins again.
        const bool begins = more && (outer == outer_ || !weights_stay(p_.g));
        multiplier_.begin(sum, begins, first, tile_.m_block);
      }
      tile_.image = info.image;
      const Block block = info.blocks[block_number_];
      if constexpr (kPrepares) epilogue_.prepare(tile_, block);
      if (info.offset[block_number_] >= 0) {
        epilogue_.template run<kPrepares>(v, tile_, block, exponent, finite);
      }
      if constexpr (kPrepares) epilogue_.template send_rest<true>();
      if constexpr (!kAhead) find_next();
      const bool leaves = outer != outer_;
      if (leaves) leave_for(outer);
      if constexpr (!kAhead) {
        multiplier_.begin(sum, more, first, tile_.m_block);
      } else if (leaves && weights_stay(p_.g)) {
        multiplier_.wait_for(sum);
        multiplier_.begin(sum, true, first, tile_.m_block);
      }
    }
    multiplier_.wait_for(sum);
    finish();
  }

 private:
  static constexpr bool kInParts = in_parts(kN, kPlanes);
  /// Whether what a store needs but values is found before the epilogue: up to 6 % less time, but
  /// 3 % more where registers are as few as in parts (H200).
  static constexpr bool kPrepares = kRole == Role::kStore && !kInParts;

  const Params& p_;
  char* shared_;
  Multiplier<kN, kPlanes, Element> multiplier_;
  Epilogue<kN, kRole> epilogue_;
  int32_t block_number_;
  int32_t outer_ = -1;
  TileOf tile_;

  CUTLASS_DEVICE static int32_t warpgroup() { return int32_t(threadIdx.x) / 128; }

  /// kMeanwhile: a tile's results are sent while the next one's products are on their way. In parts
  /// between them, four rows at a time, as the copy engine takes no more without waiting: batch
  /// norm's convolution at ieee took 4 % less (H200).
  template <bool kMeanwhile, bool kChunks>
  CUTLASS_DEVICE void run_tiles() {
    // A ring is of strips, and of one chunk.
    constexpr bool kRings = takes_rings(kN) && !kMeanwhile && (kPlanes == 2 || !kChunks);
    for (int32_t left = Schedule::count(p_); left > 0; --left) {
      const PatchInfo& info = multiplier_.next([&] {
        if constexpr (kMeanwhile) epilogue_.template send_rest<kPrepares>();
      });
      if (info.outer != outer_) leave_for(info.outer);
      tile_.image = info.image;
      const Block block = info.blocks[block_number_];
      const int32_t offset = info.offset[block_number_];
      float v[kN / 2];
      int32_t exponent = 0;
      const auto meanwhile = [&] {
        if constexpr (kMeanwhile && kInParts) {
          epilogue_.send_some();
        } else if constexpr (kMeanwhile) {
          epilogue_.prepare(tile_, block);
        }
      };
      const First first = First::of<kRings>(info, block_number_);
      const bool finite =
          multiplier_.template run<kChunks>(v, exponent, first, tile_.m_block, meanwhile);
      if constexpr (kMeanwhile && kInParts) epilogue_.template send_rest<false>();
      if constexpr (kPrepares && !kMeanwhile) epilogue_.prepare(tile_, block);
      if (offset >= 0) epilogue_.template run<kPrepares>(v, tile_, block, exponent, finite);
      if constexpr (kPrepares && !kMeanwhile) epilogue_.template send_rest<true>();
    }
    finish();
  }

  CUTLASS_DEVICE void enter(int32_t outer) {
    outer_ = outer;
    tile_.group = p_.m_tiles.divide(outer);
    tile_.m_tile = outer - tile_.group * p_.g.m_tiles;
    cutlass::arch::NamedBarrier::sync(kConsumers, kConsumerBarrier);
    multiplier_.replace_weights(outer);
    prepare_rows(p_, shared_, tile_);
    cutlass::arch::NamedBarrier::sync(kConsumers, kConsumerBarrier);
  }

  CUTLASS_DEVICE void leave_for(int32_t outer) {
    epilogue_.flush(tile_);
    enter(outer);
  }

  CUTLASS_DEVICE void finish() {
    multiplier_.finish();
    if constexpr (kRole == Role::kStore) epilogue_.template send_rest<kPrepares>();
    epilogue_.flush(tile_);
    epilogue_.finish();
  }
};

template <int kN, int kPlanes, class Element, Role kRole>
CUTLASS_DEVICE void consume(const Params& p, char* shared) {
  Consumer<kN, kPlanes, Element, kRole> consumer(p, shared);
  if constexpr (kPlanes == 2 && !in_parts(kN, kPlanes)) {
    if (p.steps_at_once == kSlabSteps) return consumer.run_ahead();
  }
  consumer.run();
}

template <int kN, int kPlanes, class Element, Role kRole>
__global__ void __launch_bounds__(kConsumers + producers(kN, kPlanes), 1)
    shift_kernel(const __grid_constant__ Params params) {
  constexpr int kProducers = producers(kN, kPlanes);
  extern __shared__ __align__(1024) char shared[];
  prepare_control(params, shared, kProducers / 32);
  cutlass::arch::fence_view_async_shared();
  __syncthreads();
  if (threadIdx.x < kConsumers || !params.x_is_complete) wait_for_previous_kernels();
  if (threadIdx.x >= kConsumers) {
    cutlass::arch::warpgroup_reg_dealloc<Registers<kN, kPlanes>::kProducer>();
    Producer<kPlanes, kProducers, kRole != Role::kStore, takes_rings(kN)>(params, shared).run();
  } else {
    cutlass::arch::warpgroup_reg_alloc<Registers<kN, kPlanes>::kConsumer>();
    consume<kN, kPlanes, Element, kRole>(params, shared);
  }
}

template <int kN, int kPlanes, class Element, Role kRole>
Status launch_shift(const Params& params, const DeviceProps& device, void* stream) noexcept {
  auto* kernel = &shift_kernel<kN, kPlanes, Element, kRole>;
  // The limit is the function's, which other threads launch with more or less.
  CUTFUSE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(device.shared_bytes)));
  const int32_t blocks = params.walks < device.sm_count ? params.walks : device.sm_count;
  return launch(kernel, dim3(static_cast<unsigned>(blocks)),
                dim3(kConsumers + producers(kN, kPlanes)), static_cast<size_t>(params.shared.total),
                stream, params);
}

template <int kN, int kPlanes, class Element, Role kRole>
Instance make_instance() {
  constexpr bool kHalf = std::is_same_v<Element, cutlass::half_t>;
  return {kHalf ? DType::kFloat16 : DType::kBFloat16, kN, kPlanes, kRole,
          &launch_shift<kN, kPlanes, Element, kRole>};
}

}  // namespace cutfuse::conv::shift::sm90
