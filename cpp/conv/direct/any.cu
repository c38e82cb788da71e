/// \file
/// Any filter, stride, dilation and layout, transposed or not: four results a thread.
#include "conv/direct/gather.cuh"
#include "core/launch.h"
#include "core/status.h"

namespace cutfuse::conv::direct {
namespace {

constexpr int kResults = 4;  // of a thread

struct Pixels {
  int64_t first, step, last;

  __device__ __forceinline__ int64_t at(int i) const { return min(first + i * step, last); }
};

__device__ __forceinline__ int64_t divide(int64_t n, int64_t divisor) {
  return ((n | divisor) >> 32) == 0 ? int64_t(uint32_t(n) / uint32_t(divisor)) : n / divisor;
}

// With six blocks a multiprocessor 66 registers; left to itself, nvcc 13.0 took 64 on sm_80 and
// spilled.
__global__ void __launch_bounds__(kThreads, 6) any_kernel(const __grid_constant__ Params p) {
  wait_for_previous_kernels();
  const int64_t unit = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (unit >= p.units) return;
  // Lanes are pixels side by side, and channels where those lie side by side.
  const int64_t pixels = p.pixels();
  const int64_t quarter = (pixels + kResults - 1) / kResults;
  const int64_t features = p.all_features();
  const int64_t line = divide(unit, p.channels_last ? features : quarter);
  const int64_t image = divide(line, p.channels_last ? quarter : features);
  const int64_t channel = p.channels_last ? unit - line * features : line - image * features;
  const auto group = static_cast<int32_t>(divide(channel, p.features));
  const Channel of{static_cast<int32_t>(image), group,
                   static_cast<int32_t>(channel - int64_t(group) * p.features)};
  const Pixels at = p.channels_last ? Pixels{(line - image * quarter) * kResults, 1, pixels - 1}
                                    : Pixels{unit - line * quarter, quarter, pixels - 1};
  int32_t h[kResults], w[kResults];
#pragma unroll
  for (int i = 0; i < kResults; ++i) {
    h[i] = static_cast<int32_t>(divide(at.at(i), p.columns.out_size));
    w[i] = static_cast<int32_t>(at.at(i) - int64_t(h[i]) * p.columns.out_size);
  }
  float v[kResults];
  gather(p, of, h, w, v);
  execute(p.program, v, Coordinates<kResults, Pixels>{p, of, at});
#pragma unroll
  for (int i = 0; i < kResults; ++i) {
    const int64_t pixel = at.first + i * at.step;
    if (pixel <= at.last) store_value(p.out, place_of(p, of, pixel), v[i], p.dtype);
  }
}

}  // namespace

Status run_any(const Params& params, void* stream) noexcept {
  return launch(&any_kernel, dim3(static_cast<unsigned>(params.blocks)), dim3(kThreads), 0, stream,
                params);
}

}  // namespace cutfuse::conv::direct
