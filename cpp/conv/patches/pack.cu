/// \file
/// The weight as the patch kernel's slabs.
#include <cuda_fp16.h>

#include "conv/packing.cuh"
#include "conv/patches/params.h"
#include "core/launch.h"
#include "program/fold.cuh"

namespace cutfuse::conv::patches {
namespace {

/// Of the divisions for each term.
struct Divisors {
  shift::Divisor taps, kernel_w;
};

/// Where a term of a row is in the weight, or kNoTap.
__device__ int64_t find_weight(const PackParams& p, const Divisors& by, int32_t row, int32_t term) {
  if (row >= p.g.out_channels || term >= p.g.terms) return shift::WeightView::kNoTap;
  const int32_t channel = by.taps.divide(term);
  const int32_t tap = term - channel * p.g.taps();
  const int32_t r = by.kernel_w.divide(tap);
  const shift::WeightView& w = p.weight;
  return row * w.k + channel * w.c + r * w.r + (tap - r * p.g.kernel_w) * w.s;
}

/// Byte `byte` of a row's 128, swizzled by those as the tensor cores read them.
__device__ int32_t swizzled(int32_t row, int32_t byte) {
  return row * kRowBytes + (byte ^ row % 8 * 16);
}

__global__ void __launch_bounds__(kMostThreads)
    pack_kernel(const __grid_constant__ PackParams p, const __grid_constant__ Divisors by) {
  const auto row = static_cast<int32_t>(blockIdx.x);
  const int32_t thread = threadIdx.x, threads = blockDim.x;
  const auto load = [&](int64_t at) {
    return at == shift::WeightView::kNoTap ? 0.f : static_cast<const float*>(p.weight.data)[at];
  };
  // What needs no value is done while the kernel before this one ends.
  const int64_t at_first = find_weight(p, by, row, thread);
  if (at_first != shift::WeightView::kNoTap) {
    prefetch_value(p.weight.data, at_first, DType::kFloat32);
  }
  wait_for_previous_kernels();
  const float first = load(at_first);
  auto* to = static_cast<char*>(p.packed);
  const int32_t bytes = slab_bytes(p.columns, p.planes);
  Magnitudes seen;
  seen.add(first);
#pragma unroll 1
  for (int32_t i = thread + threads; i < p.g.terms; i += threads) {
    seen.add(load(find_weight(p, by, row, i)));
  }
  const bool finite = __syncthreads_and(seen.finite) != 0;
  const int32_t exponent = row_exponent_of(seen.largest);
  if (thread == 0) p.words[row] = 2 * exponent + (finite ? 0 : 1);
#pragma unroll 1
  for (int32_t i = thread; i < p.g.slabs() * kSlab; i += threads) {
    float value = i == thread ? first : load(find_weight(p, by, row, i));
    if (!isfinite(value)) value = 0.f;
    scale_exactly(value, -exponent);
    // A thread's two values of eight follow each other in a register, and lie four apart in x.
    const int32_t place = i % kSlab / 8 * 8 + i % 4 * 2 + i % 8 / 4;
    char* at = to + i / kSlab * bytes + swizzled(row, place * 2);
    const __half high = __float2half_rn(value);
    *reinterpret_cast<__half*>(at) = high;
    if (p.planes == 1) continue;
    *reinterpret_cast<__half*>(at + p.columns * kRowBytes) =
        __float2half_rn(value - __half2float(high));
  }
}

}  // namespace

Status pack(const PackParams& params, void* stream) noexcept {
  return launch(&pack_kernel, dim3(static_cast<unsigned>(params.columns)),
                dim3(row_threads(params.g.slabs() * kSlab)), 0, stream, params,
                Divisors{shift::Divisor(params.g.taps()), shift::Divisor(params.g.kernel_w)});
}

}  // namespace cutfuse::conv::patches
