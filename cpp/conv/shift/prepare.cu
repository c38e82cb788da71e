/// \file
/// The weight as fp16 planes in the kernel's tiles, and batch norm's multipliers in eval.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "conv/packing.cuh"
#include "conv/shift/params.h"
#include "core/launch.h"
#include "device/values.cuh"
#include "program/fold.cuh"

namespace cutfuse::conv::shift {
namespace {

/// Of the divisions for each element of the weight.
struct Divisors {
  Divisor outer;  // channels of a phase; where phases lie next to each other, phases of a channel
                  // or, rows first, lane-channels of a row
  Divisor phases_w, dilation_h, dilation_w;

  explicit Divisors(const Geometry& g)
      : outer(g.phase_channels != 0 ? g.phase_channels
              : g.rows_first        ? g.channels * g.phases_w
                                    : g.phases_h * g.phases_w),
        phases_w(g.phases_w),
        dilation_h(g.dilation_h),
        dilation_w(g.dilation_w) {}
};

__device__ int32_t rest_of(int32_t n, const Divisor& by, int32_t quotient) {
  return n - quotient * static_cast<int32_t>(by.divisor);
}

/// As filter_index().
__device__ int32_t index_of(int32_t at, const Divisor& dilation, int32_t kernel) {
  const int32_t index = dilation.divide(at);
  return rest_of(at, dilation, index) == 0 && index < kernel ? index : -1;
}

/// Where element `lane` of a half is in the weight, for an output channel of `group`, or kNoTap.
__device__ int64_t find_weight(const PrepareParams& p, const Divisors& by, int32_t group,
                               const MadeChannel& to, Half half, int32_t lane, int32_t stacked) {
  if (half.group < 0 || to.channel < 0) return WeightView::kNoTap;
  // As lane_channel().
  const int32_t q = half.group * kLanes + lane;
  const int32_t quotient = by.outer.divide(q);
  const int32_t remainder = rest_of(q, by.outer, quotient);
  const bool next = p.g.phase_channels == 0;  // whether phases lie next to each other
  int32_t channel, phase_h, phase_w;
  if (next && p.g.rows_first) {
    phase_h = quotient;
    channel = by.phases_w.divide(remainder);
    phase_w = rest_of(remainder, by.phases_w, channel);
    if (phase_h >= p.g.phases_h) return WeightView::kNoTap;
  } else {
    const int32_t phase = next ? remainder : quotient;
    channel = next ? quotient : remainder;
    phase_h = by.phases_w.divide(phase);
    phase_w = rest_of(phase, by.phases_w, phase_h);
  }
  const int32_t tap_h = half.tap_h - stacked;
  const int32_t r =
      tap_h < 0 ? -1 : index_of(tap_h * p.g.stride_h + phase_h, by.dilation_h, p.g.kernel_h);
  const int32_t s = index_of(half.tap_w * p.g.stride_w + phase_w, by.dilation_w, p.g.kernel_w);
  if (channel >= p.g.channels || r < 0 || s < 0) return WeightView::kNoTap;
  return p.weight.index(p.g, group, to, channel, r, s);
}

__device__ uint16_t narrow(float value, DType element) {
  return static_cast<uint16_t>(pack_pair(value, 0.f, element) & 0xffffu);
}

/// Row `row` of the tiles of (group, m tile) `outer`. A thread keeps its first element and reads
/// the others, which are few, twice: a kernel that runs once pays for each instruction that it
/// fetches.
__device__ void pack_row(const PrepareParams& p, const Divisors& by, int32_t outer, int32_t row) {
  const Geometry& g = p.g;
  const int32_t group = outer / g.m_tiles;
  const int32_t channel = channel_of_row(g, outer % g.m_tiles, row);
  const MadeChannel to = channel < 0 ? MadeChannel{-1, 0, 0} : made_channel(g, channel);
  const int32_t stacked = stacked_row(g, row);
  const int32_t rows = g.weight_rows;
  const int32_t elements = p.steps * 16;
  const auto find = [&](int32_t i) {
    return find_weight(p, by, group, to, p.halves[i / 8], i % 8, stacked);
  };
  const auto load = [&](int64_t at) {
    return at == WeightView::kNoTap ? 0.f : load_mutable(p.weight.data, at, p.dtype);
  };
  const auto element = [&](int32_t i) { return load(find(i)); };
  Magnitudes seen;
  const int32_t thread = threadIdx.x, threads = blockDim.x;
  // What needs no value is done while the kernel before this one ends.
  const int64_t at_first = thread < elements ? find(thread) : WeightView::kNoTap;
  if (at_first != WeightView::kNoTap) prefetch_value(p.weight.data, at_first, p.dtype);
  wait_for_previous_kernels();
  const float first = load(at_first);
  seen.add(first);
#pragma unroll 1
  for (int32_t i = thread + threads; i < elements; i += threads) seen.add(element(i));
  const bool finite = __syncthreads_and(seen.finite) != 0;
  const int32_t exponent = p.dtype != DType::kFloat16 ? row_exponent_of(seen.largest) : 0;
  if (thread == 0) p.exponents[outer * rows + row] = RowExponent::make(exponent, finite).word;
  char* tiles =
      static_cast<char*>(p.packed) + int64_t(outer) * p.steps * p.planes * rows * kRowStepBytes;
  const auto pack = [&](int32_t i, float value) {
    scale_exactly(value, -exponent);
    const int32_t k = i % 16;
    char* at = tiles + int64_t(i / 16) * p.planes * rows * kRowStepBytes +
               (k / 8 * rows + row) * 16 + k % 8 * 2;
    const uint16_t high = narrow(value, p.element);
    *reinterpret_cast<uint16_t*>(at) = high;
    if (p.planes == 2) {
      const float rest = value - __half2float(__ushort_as_half(high));
      *reinterpret_cast<uint16_t*>(at + rows * kRowStepBytes) = narrow(rest, p.element);
    }
  };
#pragma unroll 1
  for (int32_t i = thread; i < elements; i += threads) pack(i, i == thread ? first : element(i));
}

__global__ void __launch_bounds__(kMostThreads)
    prepare_kernel(const __grid_constant__ PrepareParams p, const __grid_constant__ Divisors by) {
  const int32_t rows = p.g.weight_rows;
  const int32_t packed_rows = p.packed == nullptr ? 0 : p.g.groups * p.g.m_tiles * rows;
  const auto block = static_cast<int32_t>(blockIdx.x);
  if (block < packed_rows) {
    pack_row(p, by, block / rows, block % rows);
    return;
  }
  wait_for_previous_kernels();
  // A word to clear, or a channel.
  const int64_t index = int64_t(block - packed_rows) * blockDim.x + threadIdx.x;
  if (p.cleared != nullptr) {
    if (index < p.cleared_words) p.cleared[index] = 0;
    return;
  }
  if (index >= int64_t(p.g.groups) * p.g.out_channels) return;
  const BatchNormBuffers& bn = p.batch_norm;
  const float var = load_value(bn.running_var, index, bn.running_dtype);
  const float weight = bn.weight != nullptr ? load_value(bn.weight, index, bn.affine_dtype) : 1.f;
  p.multipliers[index] = weight / sqrtf(var + static_cast<float>(bn.eps));
}

}  // namespace

Status prepare(const PrepareParams& params, void* stream) noexcept {
  const Geometry& g = params.g;
  const unsigned threads = row_threads(params.packed != nullptr ? params.steps * 16 : 0);
  int64_t blocks = 0;
  if (params.packed != nullptr) blocks += int64_t(g.groups) * g.m_tiles * g.weight_rows;
  if (params.multipliers != nullptr) {
    blocks += ceil_div(int64_t(g.groups) * g.out_channels, threads);
  }
  if (params.cleared != nullptr) blocks += ceil_div(params.cleared_words, threads);
  if (blocks == 0) return {};
  return launch(&prepare_kernel, dim3(static_cast<unsigned>(blocks)), dim3(threads), 0, stream,
                params, Divisors(g));
}

}  // namespace cutfuse::conv::shift
