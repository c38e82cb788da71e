/// \file
/// Two launches: filters are packed and images measured, then pixels converted by what was
/// measured.
#include "conv/implicit/prepare.h"

#include "core/launch.h"
#include "split/convert.cuh"

namespace cutfuse::conv::implicit {
namespace {

using planes::kGroup;
using planes::Magnitude;

constexpr int kThreads = 256;
constexpr int kPixels = 32;              // of a block's tile, one a lane
constexpr int kGroups = 8;               // of kGroup channels: 128 bytes of a plane
constexpr int64_t kNothing = INT64_MIN;  // no place: a turned filter's are below zero

__device__ int64_t offset_of(const ConstTensor4& x, int32_t width, int32_t pixel) {
  const int32_t h = pixel / width;
  return h * x.strides[2] + (pixel - h * width) * x.strides[3];
}

/// Eight 16-bit values side by side.
__device__ uint4 as_they_are(const uint16_t (&values)[kGroup]) {
  uint4 packed;
  auto* words = &packed.x;
#pragma unroll
  for (int i = 0; i < kGroup / 2; ++i) words[i] = values[2 * i] | uint32_t(values[2 * i + 1]) << 16;
  return packed;
}

/// Converts eight elements, element(i) being where the i-th lies or kNothing for zero, and stores
/// them at `to` of each plane.
template <class Element>
__device__ void convert_group(const void* data, int32_t planes, int32_t exponent, void* to,
                              int64_t plane_stride, const Element& element) {
  uint4 hi, lo;
  if (planes == 0) {
    uint16_t values[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int64_t at = element(i);
      values[i] = at == kNothing ? 0 : __ldg(static_cast<const unsigned short*>(data) + at);
    }
    hi = as_they_are(values);
  } else {
    float values[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int64_t at = element(i);
      values[i] = at == kNothing ? 0.f : __ldg(static_cast<const float*>(data) + at);
    }
    planes::convert(values, exponent, hi, lo);
  }
  auto* first = static_cast<uint16_t*>(to);
  *reinterpret_cast<uint4*>(first) = hi;
  if (planes == 2) *reinterpret_cast<uint4*>(first + plane_stride) = lo;
}

/// One filter.
__device__ void pack_filter(const PrepareParams& p, int32_t filter) {
  const gemm::Images& images = p.images;
  const auto& strides = p.weight.strides;
  const int32_t channels = images.tap_channels();
  const int64_t row = int64_t(images.taps()) * channels;
  const int64_t from = filter * strides[0];
  // Of group `g` of the packed row, where its elements lie.
  const auto element_of = [&](int64_t begin) {
    const auto tap = static_cast<int32_t>(begin / channels);
    const auto channel = static_cast<int32_t>(begin - int64_t(tap) * channels);
    const int32_t r = tap / images.kernel_w;
    const int64_t at = from + r * strides[2] + (tap - r * images.kernel_w) * strides[3];
    return [=, &images, &strides](int i) {
      return channel + i < images.channels ? at + (channel + i) * strides[1] : kNothing;
    };
  };
  int32_t exponent = 0;
  if (p.planes > 0) {
    Magnitude magnitude;
    for (int64_t begin = int64_t(threadIdx.x) * kGroup; begin < row; begin += kThreads * kGroup) {
      const auto element = element_of(begin);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const int64_t at = element(i);
        if (at != kNothing) magnitude.add(__ldg(static_cast<const float*>(p.weight.data) + at));
      }
    }
    magnitude = planes::merge_row<kThreads>(magnitude);
    exponent = planes::scale_exponent(magnitude.bits);
    if (threadIdx.x == 0) p.filter_words[filter] = 2 * exponent + (magnitude.nonfinite ? 1 : 0);
  }
  auto* to = static_cast<uint16_t*>(p.filter_planes) + filter * row;
  for (int64_t begin = int64_t(threadIdx.x) * kGroup; begin < row; begin += kThreads * kGroup) {
    convert_group(p.weight.data, p.planes, exponent, to + begin, p.filters * row,
                  element_of(begin));
  }
}

/// One part of an image.
__device__ void measure(const PrepareParams& p, int32_t image, int32_t part) {
  const gemm::Images& images = p.images;
  const int64_t pixels = int64_t(images.height) * images.width;
  const int64_t count = images.channels * pixels;
  const auto* x = static_cast<const float*>(p.x.data) + image * p.x.strides[0];
  const int64_t step = int64_t(p.parts) * kThreads;
  const int64_t first = int64_t(part) * kThreads + threadIdx.x;
  Magnitude magnitude;
  if (p.dense && reinterpret_cast<uintptr_t>(x) % 16 == 0) {
#pragma unroll 4
    for (int64_t i = first; i < count / 4; i += step) {
      const float4 four = __ldg(reinterpret_cast<const float4*>(x) + i);
      magnitude.add(four.x);
      magnitude.add(four.y);
      magnitude.add(four.z);
      magnitude.add(four.w);
    }
    if (const int64_t i = count / 4 * 4 + first; i < count) magnitude.add(__ldg(x + i));
  } else if (p.dense) {
#pragma unroll 4
    for (int64_t i = first; i < count; i += step) magnitude.add(__ldg(x + i));
  } else {
    for (int64_t i = first; i < count; i += step) {
      const int64_t channel = i / pixels;
      magnitude.add(
          __ldg(x + channel * p.x.strides[1] +
                offset_of(p.x, images.width, static_cast<int32_t>(i - channel * pixels))));
    }
  }
  magnitude = planes::merge_row<kThreads>(magnitude);
  if (threadIdx.x == 0) {
    p.measured[int64_t(image) * p.parts + part] = {magnitude.bits, magnitude.nonfinite ? 1u : 0u};
  }
}

__global__ void __launch_bounds__(kThreads)
    measure_kernel(const __grid_constant__ PrepareParams p) {
  wait_for_previous_kernels();
  const int32_t filters = p.weight.data != nullptr ? p.filters : 0;
  const auto block = static_cast<int32_t>(blockIdx.x);
  if (block < filters) {
    pack_filter(p, block);
  } else {
    measure(p, (block - filters) / p.parts, (block - filters) % p.parts);
  }
}

__device__ Measured merge_parts(const PrepareParams& p, int32_t image) {
  Measured whole{0, 0};
  for (int32_t part = 0; part < p.parts; ++part) {
    const Measured one = p.measured[int64_t(image) * p.parts + part];
    whole = {max(whole.bits, one.bits), whole.nonfinite | one.nonfinite};
  }
  return whole;
}

/// 32 pixels of 64 channels.
__device__ void convert_tile(const PrepareParams& p, int32_t image, int32_t first_pixel,
                             int32_t first_channel) {
  const gemm::Images& images = p.images;
  const int32_t pixels = images.height * images.width;
  const int64_t stride = images.pixel_stride;
  const int64_t plane_stride = int64_t(images.count) * pixels * stride;
  const int32_t exponent = p.planes > 0 ? planes::scale_exponent(merge_parts(p, image).bits) : 0;
  // Lanes follow what lies side by side in x, and store what does in the planes.
  const int thread = threadIdx.x;
  const int lane_pixel = thread % kPixels;
  const int lane_group = thread / kPixels;
  const int out_pixel = thread / kGroups;
  const int out_group = thread % kGroups;
  const int pixel = first_pixel + (p.by_channels ? out_pixel : lane_pixel);
  const int channel = first_channel + (p.by_channels ? out_group : lane_group) * kGroup;
  const int64_t from =
      image * p.x.strides[0] + offset_of(p.x, images.width, min(pixel, pixels - 1));
  const auto element = [&](int i) {
    return pixel < pixels && channel + i < images.channels ? from + (channel + i) * p.x.strides[1]
                                                           : kNothing;
  };
  auto* planes = static_cast<uint16_t*>(p.x_planes) + int64_t(image) * pixels * stride;
  if (p.by_channels) {
    if (pixel < pixels && channel < stride) {
      convert_group(p.x.data, p.planes, exponent, planes + pixel * stride + channel, plane_stride,
                    element);
    }
    return;
  }
  __shared__ uint4 staged[2][kPixels][kGroups + 1];
  convert_group(p.x.data, p.planes, exponent, &staged[0][lane_pixel][lane_group],
                sizeof(staged[0]) / sizeof(uint16_t), element);
  __syncthreads();
  const int32_t to_pixel = first_pixel + out_pixel;
  const int32_t to_channel = first_channel + out_group * kGroup;
  if (to_pixel >= pixels || to_channel >= stride) return;
  auto* to = planes + to_pixel * stride + to_channel;
  *reinterpret_cast<uint4*>(to) = staged[0][out_pixel][out_group];
  if (p.planes == 2) {
    *reinterpret_cast<uint4*>(to + plane_stride) = staged[1][out_pixel][out_group];
  }
}

/// Whether a filter at result pixel `row` meets what is not finite.
__device__ bool meets_nonfinite(const PrepareParams& p, int32_t row) {
  const gemm::Images& images = p.images;
  const gemm::FirstTap first = gemm::first_tap(images, row);
  for (int32_t r = 0; r < images.kernel_h; ++r) {
    for (int32_t s = 0; s < images.kernel_w; ++s) {
      const int32_t h = first.h + r * images.dilation_h;
      const int32_t w = first.w + s * images.dilation_w;
      if (h < 0 || h >= images.height || w < 0 || w >= images.width) continue;
      const int64_t at = first.image * p.x.strides[0] + h * p.x.strides[2] + w * p.x.strides[3];
      for (int32_t c = 0; c < images.channels; ++c) {
        if (!isfinite(__ldg(static_cast<const float*>(p.x.data) + at + c * p.x.strides[1]))) {
          return true;
        }
      }
    }
  }
  return false;
}

__device__ void write_word(const PrepareParams& p, int32_t row) {
  const int32_t image = row / p.images.out_pixels();
  const Measured whole = merge_parts(p, image);
  const bool bad = whole.nonfinite != 0 && meets_nonfinite(p, row);
  p.row_words[row] = 2 * planes::scale_exponent(whole.bits) + (bad ? 1 : 0);
}

__global__ void __launch_bounds__(kThreads)
    convert_kernel(const __grid_constant__ PrepareParams p, int32_t pixel_tiles,
                   int32_t channel_tiles) {
  wait_for_previous_kernels();
  const int64_t tiles = int64_t(p.images.count) * pixel_tiles * channel_tiles;
  if (blockIdx.x < tiles) {
    const int32_t channel_tile = blockIdx.x % channel_tiles;
    const int32_t rest = blockIdx.x / channel_tiles;
    convert_tile(p, rest / pixel_tiles, rest % pixel_tiles * kPixels,
                 channel_tile * kGroups * kGroup);
    return;
  }
  const int64_t row = (blockIdx.x - tiles) * kThreads + threadIdx.x;
  if (row < int64_t(p.images.count) * p.images.out_pixels()) {
    write_word(p, static_cast<int32_t>(row));
  }
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

Status launch_measure(const PrepareParams& params, bool measures, void* stream) {
  const int64_t filters = params.weight.data != nullptr ? params.filters : 0;
  const int64_t blocks = filters + (measures ? int64_t(params.images.count) * params.parts : 0);
  if (blocks == 0) return {};
  return launch(&measure_kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream,
                params);
}

}  // namespace

Status pack_filters(const PrepareParams& params, void* stream) noexcept {
  return launch_measure(params, false, stream);
}

Status prepare(const PrepareParams& params, void* stream) noexcept {
  const bool scales = params.planes > 0;
  if (Status status = launch_measure(params, scales, stream); !status.ok()) return status;
  if (params.x_planes == nullptr) return {};
  const gemm::Images& images = params.images;
  const auto pixel_tiles =
      static_cast<int32_t>(ceil_div(int64_t(images.height) * images.width, kPixels));
  const auto channel_tiles = static_cast<int32_t>(ceil_div(images.pixel_stride, kGroups * kGroup));
  const int64_t rows = int64_t(images.count) * images.out_pixels();
  const int64_t blocks =
      int64_t(images.count) * pixel_tiles * channel_tiles + (scales ? ceil_div(rows, kThreads) : 0);
  CUTFUSE_CHECK(blocks < int64_t(1) << 31, Code::kNotSupported,
                "converting takes %lld blocks, at most 2^31 - 1 are supported; split the batch",
                static_cast<long long>(blocks));
  return launch(&convert_kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream,
                params, pixel_tiles, channel_tiles);
}

}  // namespace cutfuse::conv::implicit
