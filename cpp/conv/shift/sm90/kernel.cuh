/// \file
/// The shift kernel: a convolution straight from NCHW. Two warpgroups read and convert patches of
/// the image, two multiply them by the weights and store, over a ring of patches in shared memory.
#pragma once

#include <cutlass/arch/grid_dependency_control.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/numeric_types.h>

#include <type_traits>

#include "conv/shift/sm90/consumer.cuh"
#include "conv/shift/sm90/epilogue.cuh"
#include "conv/shift/sm90/producer.cuh"
#include "core/launch.h"

namespace cutfuse::conv::shift::sm90 {

/// Registers of a thread, where one warpgroup produces. Together no more than the kernel is
/// launched with, 168 each: else they would wait forever.
inline constexpr uint32_t kProducerRegisters = 104;
inline constexpr uint32_t kConsumerRegisters = 200;
static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 3 * 168);

CUTLASS_DEVICE void prepare_control(const Params& p, char* shared) {
  auto& control = *reinterpret_cast<Control*>(shared + p.shared.control);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMaxStages; ++i) {
      Barrier::init(&control.full[i], 1);
      Barrier::init(&control.empty[i], kConsumerWarps);
    }
    for (int i = 0; i < min(p.g.slab_ring, p.g.slabs); ++i) {
      Barrier::init(&control.slab_full[i], 1);
      Barrier::init(&control.slab_empty[i], kConsumerWarps);
    }
    for (int i = 0; i < 3; ++i) control.largest[i] = 0;
    cutlass::arch::fence_barrier_init();
  }
  auto* lanes = reinterpret_cast<LaneOffset*>(shared + p.shared.lanes);
  for (int q = threadIdx.x; q < p.g.lane_groups * kLanes; q += blockDim.x) {
    const LaneChannel lane = lane_channel(p.g, q);
    const bool exists = lane.channel < p.g.channels;
    lanes[q] = {uint32_t(lane.channel) * p.channel_bytes + uint32_t(lane.phase_h) * p.row_bytes +
                    uint32_t(lane.phase_w) * p.column_bytes,
                int16_t(exists ? lane.phase_h : INT16_MIN), int16_t(lane.phase_w)};
  }
}

/// Folds the program's affine steps for the rows of one (group, m tile).
CUTLASS_DEVICE void prepare_rows(const Params& p, char* shared, int32_t group, int32_t m_tile) {
  auto* rows = reinterpret_cast<RowConstants*>(shared + p.shared.rows);
  const int32_t count = p.g.m_blocks * 64;
  const int32_t outer = group * p.g.m_tiles + m_tile;
  for (int32_t row = threadIdx.x; row < count; row += kConsumers) {
    const int32_t channel = channel_of_row(p.g, m_tile, row);
    RowConstants constants{0.f, 0.f, 0, 1};
    if (channel >= 0) {
      const int64_t index = int64_t(group) * p.g.out_channels + channel;
      constants.exponent = p.exponents[outer * count + row];
      const FoldedColumn folded =
          fold(p.program, p.affine_steps, constants.exponent, [&](int operand) {
            const Operand& o = p.program.operands[operand];
            return load_value(o.data, index * o.row_stride, o.dtype);
          });
      constants.scale = folded.scale;
      constants.shift = folded.shift;
      constants.plain = folded.plain;
    }
    rows[row] = constants;
  }
}

template <int kN, int kPlanes, class Element>
CUTLASS_DEVICE void consume(const Params& p, char* shared) {
  const int32_t warpgroup = int32_t(threadIdx.x) / 128;
  const int32_t m_block = p.g.m_blocks == 2 ? warpgroup : 0;
  const int32_t block_number = p.g.tile_blocks == 2 ? warpgroup : 0;
  Slabs slabs(p, shared);
  Multiplier<kN, kPlanes, Element> multiplier(p, shared, slabs);
  Epilogue<kN> epilogue(p, shared);
  slabs.start();
  int32_t group = -1;
  int32_t m_tile = -1;
  for (Schedule schedule(p); schedule.more(); schedule.next()) {
    const Tile tile = decode(p, schedule.index());
    if (tile.group != group || tile.m_tile != m_tile) {
      if (group >= 0) epilogue.flush(group, m_tile, m_block);
      group = tile.group;
      m_tile = tile.m_tile;
      cutlass::arch::NamedBarrier::sync(kConsumers, kConsumerBarrier);
      slabs.replace(group * p.g.m_tiles + m_tile);
      prepare_rows(p, shared, group, m_tile);
      cutlass::arch::NamedBarrier::sync(kConsumers, kConsumerBarrier);
    }
    const Block first = make_block(p, tile, tile.first);
    const Block block = make_block(p, tile, tile.first + block_number);
    const bool active = tile.first + block_number < p.g.blocks;
    float v[kN / 2];
    int32_t exponent = 0;
    multiplier.run(v, exponent, block.flat - first.flat, m_block);
    if (active) epilogue.run(v, tile, block, exponent, m_block);
  }
  if (group >= 0) epilogue.flush(group, m_tile, m_block);
  epilogue.finish();
}

template <int kN, int kPlanes, class Element>
__global__ void __launch_bounds__(kConsumers + producers(kN, kPlanes), 1)
    shift_kernel(const __grid_constant__ Params params) {
  constexpr int kProducers = producers(kN, kPlanes);
  extern __shared__ __align__(1024) char shared[];
  prepare_control(params, shared);
  cutlass::arch::fence_view_async_shared();
  __syncthreads();
  cutlass::arch::wait_on_dependent_grids();
  cutlass::arch::launch_dependent_grids();
  if (threadIdx.x >= kConsumers) {
    if constexpr (kProducers == 128) cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    Producer<kPlanes, kProducers>(params, shared).run();
  } else {
    if constexpr (kProducers == 128) cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    consume<kN, kPlanes, Element>(params, shared);
  }
}

template <int kN, int kPlanes, class Element>
Status launch_shift(const Params& params, const DeviceProps& device, void* stream) noexcept {
  auto* kernel = &shift_kernel<kN, kPlanes, Element>;
  CUTFUSE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    params.shared.total));
  const int32_t walks = (params.tile_count + params.walk - 1) / params.walk;
  const int32_t blocks = walks < device.sm_count ? walks : device.sm_count;
  return launch(kernel, dim3(static_cast<unsigned>(blocks)),
                dim3(kConsumers + producers(kN, kPlanes)), static_cast<size_t>(params.shared.total),
                stream, params);
}

template <int kN, int kPlanes, class Element>
Instance make_instance() {
  constexpr bool kHalf = std::is_same_v<Element, cutlass::half_t>;
  return {kHalf ? DType::kFloat16 : DType::kBFloat16, kN, kPlanes,
          &launch_shift<kN, kPlanes, Element>};
}

}  // namespace cutfuse::conv::shift::sm90
