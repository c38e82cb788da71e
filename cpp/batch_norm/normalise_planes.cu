/// \file
/// The normalise pass over the planes of NCHW, in place.
#include <algorithm>

#include "batch_norm/kernels.h"
#include "core/launch.h"
#include "core/status.h"
#include "device/values.cuh"
#include "program/executor.cuh"

namespace cutfuse::batch_norm {
namespace {

constexpr int kThreads = 256;
constexpr int kPixels = 4;  // of a thread, in each of two planes

/// Rows are pixels and columns channels, as of the contraction.
struct Coordinates {
  static constexpr int kRows = kPixels;
  static constexpr int kColumnPairs = 1;
  static constexpr int kSize = 2 * kPixels;
  static constexpr int kColumnPairStride = 2;
  static constexpr bool kPlanes = false;
  static constexpr int kStagedOperands = 0;

  const Planes& planes;
  int64_t image;
  int64_t pixel0;
  int64_t column0;

  __device__ int64_t pixel(int r) const { return min(pixel0 + r, planes.pixels - 1); }
  __device__ int64_t column(int, int c) const { return min(column0 + c, planes.channels - 1); }
  /// Of the result, to the first plane of the image.
  __device__ int64_t image_offset() const { return image * planes.channels * planes.pixels; }
};

/// Full operands lie as the result does.
__device__ __forceinline__ int64_t row_offset(const Coordinates& at, int r,
                                              const Operand& operand) {
  return operand.row_stride == 0 ? 0 : at.image_offset() + at.pixel(r);
}

__device__ __forceinline__ int index(int r, int c) { return 2 * r + c; }

/// kVector: planes are whole fours, aligned.
template <bool kVector>
__device__ __forceinline__ void load(const Planes& planes, const Coordinates& at,
                                     float (&v)[Coordinates::kSize]) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int64_t plane = at.image_offset() + at.column(0, c) * planes.pixels;
    if (!kVector) {
#pragma unroll
      for (int r = 0; r < kPixels; ++r) {
        v[index(r, c)] = load_mutable(planes.data, plane + at.pixel(r), planes.dtype);
      }
    } else if (planes.dtype == DType::kFloat32) {
      const float4 four = *reinterpret_cast<const float4*>(static_cast<const float*>(planes.data) +
                                                           plane + at.pixel0);
      v[index(0, c)] = four.x;
      v[index(1, c)] = four.y;
      v[index(2, c)] = four.z;
      v[index(3, c)] = four.w;
    } else {
      const uint2 words = *reinterpret_cast<const uint2*>(
          static_cast<const uint16_t*>(planes.data) + plane + at.pixel0);
      const float2 pairs[2] = {unpack_pair(words.x, planes.dtype),
                               unpack_pair(words.y, planes.dtype)};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        v[index(2 * i, c)] = pairs[i].x;
        v[index(2 * i + 1, c)] = pairs[i].y;
      }
    }
  }
}

template <bool kVector>
__device__ __forceinline__ void store(const Planes& planes, const Coordinates& at,
                                      const float (&v)[Coordinates::kSize]) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    if (at.column0 + c >= planes.channels) return;
    const int64_t plane = at.image_offset() + (at.column0 + c) * planes.pixels;
    if (!kVector) {
#pragma unroll
      for (int r = 0; r < kPixels; ++r) {
        if (at.pixel0 + r < planes.pixels) {
          store_value(planes.data, plane + at.pixel0 + r, v[index(r, c)], planes.dtype);
        }
      }
    } else if (planes.dtype == DType::kFloat32) {
      *reinterpret_cast<float4*>(static_cast<float*>(planes.data) + plane + at.pixel0) = {
          v[index(0, c)], v[index(1, c)], v[index(2, c)], v[index(3, c)]};
    } else {
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(planes.data) + plane + at.pixel0) = {
          pack_pair(v[index(0, c)], v[index(1, c)], planes.dtype),
          pack_pair(v[index(2, c)], v[index(3, c)], planes.dtype)};
    }
  }
}

/// Pixels are taken from the last image to the first: the contraction wrote the last ones most
/// recently, so they are still in L2. Left to itself, nvcc 13.0 took 48 registers and spilled.
template <bool kVector>
__global__ void __launch_bounds__(kThreads, 4)
    normalise_planes_kernel(const Planes planes, int64_t units,
                            const __grid_constant__ BatchNormBuffers buffers,
                            const __grid_constant__ DeviceProgram after) {
  wait_for_previous_kernels();
  if (buffers.num_batches_tracked != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
    ++*buffers.num_batches_tracked;
  }
  const int64_t numbered = units - 1 - (int64_t(blockIdx.x) * kThreads + threadIdx.x);
  const int64_t unit = max(numbered, int64_t(0));  // whole warps run the program
  // Units are fewer than 2^39, so that lines are, and a plane has fewer than 2^30 pixels.
  const int32_t fours = static_cast<int32_t>(planes.pixels + kPixels - 1) / kPixels;
  const int32_t pairs = static_cast<int32_t>(planes.channels + 1) / 2;
  const int64_t line = unit / fours;
  const int64_t image = line / pairs;
  const Coordinates at{planes, image, (unit - line * fours) * kPixels, (line - image * pairs) * 2};
  float v[Coordinates::kSize];
  load<kVector>(planes, at, v);
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int64_t column = at.column(0, c);
    const auto affine = [&](const void* values, float otherwise) {
      return values != nullptr ? load_value(values, column, buffers.affine_dtype) : otherwise;
    };
    const float mean = buffers.save_mean[column];
    const float scale = buffers.save_invstd[column] * affine(buffers.weight, 1.f);
    const float shift = affine(buffers.bias, 0.f);
#pragma unroll
    for (int r = 0; r < kPixels; ++r) {
      v[index(r, c)] = fmaf(v[index(r, c)] - mean, scale, shift);
    }
  }
  execute(after, v, at);
  if (numbered >= 0) store<kVector>(planes, at, v);
}

}  // namespace

Status normalise_planes(const Planes& planes, const Moments* partials, int64_t partial_count,
                        const BatchNormBuffers& buffers, const DeviceProgram& after,
                        void* stream) noexcept {
  const Columns stored{planes.data, planes.dtype,  planes.pixels,
                       1,           planes.pixels, planes.channels * planes.pixels};
  if (Status status = finalise({partials, partial_count}, planes.images * planes.pixels,
                               planes.channels, stored, buffers, stream);
      !status.ok()) {
    return status;
  }
  const bool vectors =
      planes.pixels % kPixels == 0 && reinterpret_cast<uintptr_t>(planes.data) % 16 == 0;
  const int64_t fours = (planes.pixels + kPixels - 1) / kPixels;
  const int64_t units = planes.images * ((planes.channels + 1) / 2) * fours;
  const int64_t blocks = (units + kThreads - 1) / kThreads;
  CUTFUSE_CHECK(blocks < int64_t(1) << 31, Code::kNotSupported,
                "batch_norm of %lld planes of %lld pixels: split the batch",
                static_cast<long long>(planes.images * planes.channels),
                static_cast<long long>(planes.pixels));
  return cutfuse::launch(vectors ? normalise_planes_kernel<true> : normalise_planes_kernel<false>,
                         dim3(static_cast<unsigned>(blocks)), kThreads, 0, stream, planes, units,
                         buffers, after);
}

}  // namespace cutfuse::batch_norm
