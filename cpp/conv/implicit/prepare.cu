/// \file
/// Two launches: filters are packed and pixels converted with a guessed exponent, then images whose
/// guess was wrong converted again and rows' words written. 16-bit values need the first alone.
#include "conv/implicit/prepare.h"

#include "core/launch.h"
#include "split/convert.cuh"

namespace cutfuse::conv::implicit {
namespace {

using planes::kGroup;
using planes::Magnitude;

constexpr int kThreads = 256;
constexpr int kGroups = kTileChannels / kGroup;  // 128 bytes of a plane
constexpr int kSamples = 1024;                   // that an exponent is guessed from
constexpr int kHeadroom = 4;                     // exponents above the largest of those
constexpr int32_t kNoGuess = INT32_MIN;          // nothing but zeros were sampled
constexpr int64_t kNothing = INT64_MIN;          // no place: a turned filter's are below zero

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

/// One filter, by a block or a warp.
template <int kLanes>
__device__ void pack_filter(const PrepareParams& p, int32_t filter) {
  const int64_t first = int64_t(threadIdx.x) % kLanes * kGroup;
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
    for (int64_t begin = first; begin < row; begin += kLanes * kGroup) {
      const auto element = element_of(begin);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const int64_t at = element(i);
        if (at != kNothing) magnitude.add(__ldg(static_cast<const float*>(p.weight.data) + at));
      }
    }
    magnitude = planes::merge_row<kLanes>(magnitude);
    exponent = planes::scale_exponent(magnitude.bits);
    if (first == 0) p.filter_words[filter] = 2 * exponent + (magnitude.nonfinite ? 1 : 0);
  }
  auto* to = static_cast<uint16_t*>(p.filter_planes) + filter * row;
  for (int64_t begin = first; begin < row; begin += kLanes * kGroup) {
    convert_group(p.weight.data, p.planes, exponent, to + begin, p.filters * row,
                  element_of(begin));
  }
}

/// Filters that a block packs: of short ones each warp has its own, or few threads would have
/// something to load (2,048 filters of 512 terms: 15 us of a conversion that took 20, H200).
__host__ __device__ int32_t filters_of_block(const gemm::Images& images) {
  return images.taps() * images.tap_channels() <= 1024 ? kThreads / 32 : 1;
}

/// Those of one block.
__device__ void pack_filters_of(const PrepareParams& p, int32_t block) {
  const int32_t together = filters_of_block(p.images);
  if (together == 1) {
    pack_filter<kThreads>(p, block);
  } else if (const int32_t filter = block * together + threadIdx.x / 32; filter < p.filters) {
    pack_filter<32>(p, filter);
  }
}

/// The exponent that an image is converted with before it was read. By one block.
__device__ int32_t guess(const PrepareParams& p, int32_t image) {
  const gemm::Images& images = p.images;
  const int32_t pixels = images.height * images.width;
  const int64_t count = int64_t(images.channels) * pixels;
  // Odd, so that it does not meet one column alone.
  const int64_t step = max(count / kSamples - 1, int64_t(0)) | 1;
  const auto* x = static_cast<const float*>(p.x.data) + image * p.x.strides[0];
  Magnitude magnitude;
#pragma unroll
  for (int i = 0; i < kSamples / kThreads; ++i) {
    const int64_t element = (i * kThreads + threadIdx.x) * step;
    if (element >= count) break;
    const auto channel = static_cast<int32_t>(element / pixels);
    magnitude.add(
        __ldg(x + channel * p.x.strides[1] +
              offset_of(p.x, images.width, static_cast<int32_t>(element - channel * pixels))));
  }
  const uint32_t bits = planes::merge_row<kThreads>(magnitude).bits;
  return bits == 0 ? kNoGuess : planes::scale_exponent(bits) - kHeadroom;
}

/// Of the largest magnitude of a whole image. By one warp.
__device__ Measured merge_parts(const PrepareParams& p, int32_t image) {
  Measured whole{0, 0};
  for (int32_t part = threadIdx.x % 32; part < p.parts; part += 32) {
    const Measured one = p.measured[int64_t(image) * p.parts + part];
    whole = {max(whole.bits, one.bits), whole.nonfinite | one.nonfinite};
  }
  return {__reduce_max_sync(0xffffffffu, whole.bits),
          __any_sync(0xffffffffu, whole.nonfinite != 0) ? 1u : 0u};
}

/// Whether the planes of an image of largest magnitude `bits` are right as they were guessed.
__device__ bool was_right(int32_t guessed, uint32_t bits) {
  if (guessed == kNoGuess) return bits == 0;
  return planes::scale_exponent(bits) >= guessed;  // else they hold infinity
}

/// Eight elements of a pixel from `channel` on, zero where there are none.
template <class Value>
__device__ void load_group(const PrepareParams& p, const Value* pixel, int32_t channel,
                           Value (&values)[kGroup]) {
  if (sizeof(Value) == 4 && p.by_fours && channel + kGroup <= p.images.channels) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 four = __ldg(reinterpret_cast<const float4*>(pixel + channel) + half);
      values[4 * half] = four.x;
      values[4 * half + 1] = four.y;
      values[4 * half + 2] = four.z;
      values[4 * half + 3] = four.w;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    const bool inside = channel + i < p.images.channels;
    values[i] = inside ? __ldg(pixel + (channel + i) * p.x.strides[1]) : Value(0);
  }
}

/// Tiles of an image in the order of its planes: of pixels, and then of channels.
struct Walk {
  int32_t tile, end, channel_tiles;
  int32_t pixel_tile, channel_tile;

  __device__ Walk(const PrepareParams& p, int32_t part)
      : channel_tiles(
            static_cast<int32_t>((p.images.pixel_stride + kTileChannels - 1) / kTileChannels)) {
    const int32_t pixels = p.images.height * p.images.width;
    const int64_t tiles = int64_t((pixels + kTilePixels - 1) / kTilePixels) * channel_tiles;
    tile = static_cast<int32_t>(tiles * part / p.parts);
    end = static_cast<int32_t>(tiles * (part + 1) / p.parts);
    pixel_tile = tile / channel_tiles;
    channel_tile = tile - pixel_tile * channel_tiles;
  }
  __device__ void advance() {
    ++tile;
    if (++channel_tile == channel_tiles) {
      channel_tile = 0;
      ++pixel_tile;
    }
  }
};

/// The tiles of a part. Returns what was read.
template <class Value, bool kByChannels>
__device__ Magnitude convert_part(const PrepareParams& p, int32_t image, int32_t part,
                                  int32_t exponent) {
  __shared__ uint4 staged[2][kTilePixels][kGroups + 1];
  const gemm::Images& images = p.images;
  const int32_t pixels = images.height * images.width;
  const int64_t stride = images.pixel_stride;
  const int64_t plane_stride = int64_t(images.count) * pixels * stride;
  auto* planes = static_cast<uint16_t*>(p.x_planes) + int64_t(image) * pixels * stride;
  const auto* x = static_cast<const Value*>(p.x.data) + image * p.x.strides[0];
  // Lanes follow what lies side by side in x, and store what does in the planes.
  const int thread = threadIdx.x;
  const int out_pixel = thread / kGroups;
  const int out_group = thread % kGroups;
  const int in_pixel = kByChannels ? out_pixel : thread % kTilePixels;
  const int in_group = kByChannels ? out_group : thread / kTilePixels;
  const auto load = [&](const Walk& at, Value(&values)[kGroup]) {
    const int32_t pixel = min(at.pixel_tile * kTilePixels + in_pixel, pixels - 1);
    load_group(p, x + offset_of(p.x, images.width, pixel),
               (at.channel_tile * kGroups + in_group) * kGroup, values);
  };
  Magnitude magnitude;
  const auto convert = [&](const Walk& at, const Value(&values)[kGroup]) {
    uint4 hi, lo{};
    if constexpr (sizeof(Value) == 4) {
#pragma unroll
      for (const Value value : values) magnitude.add(value);
      planes::convert(values, exponent, hi, lo);
    } else {
      hi = as_they_are(values);
    }
    if constexpr (!kByChannels) {
      __syncthreads();
      staged[0][in_pixel][in_group] = hi;
      if (p.planes == 2) staged[1][in_pixel][in_group] = lo;
      __syncthreads();
      hi = staged[0][out_pixel][out_group];
      if (p.planes == 2) lo = staged[1][out_pixel][out_group];
    }
    const int32_t pixel = at.pixel_tile * kTilePixels + out_pixel;
    const int32_t channel = (at.channel_tile * kGroups + out_group) * kGroup;
    if (pixel >= pixels || channel >= stride) return;
    uint16_t* to = planes + pixel * stride + channel;
    *reinterpret_cast<uint4*>(to) = hi;
    if (p.planes == 2) *reinterpret_cast<uint4*>(to + plane_stride) = lo;
  };
  // Two tiles in turns: one that were moved to the other's registers would be waited for.
  Walk at(p, part), next = at;
  Value even[kGroup], odd[kGroup];
  if (at.tile < at.end) load(at, even);
  while (at.tile < at.end) {
    next.advance();
    if (next.tile < next.end) load(next, odd);
    convert(at, even);
    if (next.tile >= next.end) break;
    at = next;
    at.advance();
    if (at.tile < at.end) load(at, even);
    convert(next, odd);
    next = at;
  }
  return magnitude;
}

template <class Value, bool kByChannels>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    convert_kernel(const __grid_constant__ PrepareParams p, int32_t filter_blocks) {
  wait_for_previous_kernels();
  const auto block = static_cast<int32_t>(blockIdx.x);
  if (block < filter_blocks) {
    pack_filters_of(p, block);
    return;
  }
  const int32_t image = (block - filter_blocks) / p.parts;
  const int32_t part = (block - filter_blocks) % p.parts;
  const int32_t guessed = p.planes > 0 ? guess(p, image) : 0;
  const int32_t exponent = guessed == kNoGuess ? 0 : guessed;
  Magnitude magnitude = convert_part<Value, kByChannels>(p, image, part, exponent);
  if (p.planes == 0) return;
  __syncthreads();  // what merged the guess is read
  magnitude = planes::merge_row<kThreads>(magnitude);
  if (threadIdx.x == 0) {
    p.measured[int64_t(image) * p.parts + part] = {magnitude.bits, magnitude.nonfinite ? 1u : 0u};
    if (part == 0) p.guesses[image] = guessed;
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

/// Of a block's result pixels.
__device__ void write_words(const PrepareParams& p, int64_t first) {
  __shared__ Measured of_image[kThreads + 1];
  __shared__ int32_t exponent_of[kThreads + 1];
  const int64_t rows = int64_t(p.images.count) * p.images.out_pixels();
  const auto first_image = static_cast<int32_t>(first / p.images.out_pixels());
  const int64_t end = min(first + kThreads, rows);
  const auto last_image = static_cast<int32_t>((end - 1) / p.images.out_pixels());
  for (int32_t i = threadIdx.x / 32; i <= last_image - first_image; i += kThreads / 32) {
    const Measured whole = merge_parts(p, first_image + i);
    const int32_t guessed = p.guesses[first_image + i];
    of_image[i] = whole;
    exponent_of[i] = was_right(guessed, whole.bits) && guessed != kNoGuess
                         ? guessed
                         : planes::scale_exponent(whole.bits);
  }
  __syncthreads();
  const int64_t row = first + threadIdx.x;
  if (row >= rows) return;
  const auto i = static_cast<int32_t>(row / p.images.out_pixels()) - first_image;
  const bool bad = of_image[i].nonfinite != 0 && meets_nonfinite(p, static_cast<int32_t>(row));
  p.row_words[row] = 2 * exponent_of[i] + (bad ? 1 : 0);
}

/// Words of rows, and images that were converted with a wrong guess.
template <bool kByChannels>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    finish_kernel(const __grid_constant__ PrepareParams p, int32_t word_blocks) {
  wait_for_previous_kernels();
  const auto block = static_cast<int32_t>(blockIdx.x);
  if (block < word_blocks) {
    write_words(p, int64_t(block) * kThreads);
    return;
  }
  const int32_t image = (block - word_blocks) / p.parts;
  const int32_t part = (block - word_blocks) % p.parts;
  const Measured whole = merge_parts(p, image);
  if (was_right(p.guesses[image], whole.bits)) return;
  convert_part<float, kByChannels>(p, image, part, planes::scale_exponent(whole.bits));
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Of `first` blocks, and then of those that convert an image's parts.
template <class Kernel>
Status launch_on(Kernel kernel, int64_t first, bool converts, const PrepareParams& params,
                 void* stream) {
  const int64_t blocks = first + (converts ? int64_t(params.images.count) * params.parts : 0);
  if (blocks == 0) return {};
  CUTFUSE_CHECK(blocks < int64_t(1) << 31, Code::kNotSupported,
                "converting takes %lld blocks, at most 2^31 - 1 are supported; split the batch",
                static_cast<long long>(blocks));
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, params,
                static_cast<int32_t>(first));
}

Status launch_convert(const PrepareParams& params, bool converts, void* stream) {
  const int64_t filter_blocks =
      params.weight.data != nullptr ? ceil_div(params.filters, filters_of_block(params.images)) : 0;
  const auto kernel =
      params.planes > 0
          ? (params.by_channels ? &convert_kernel<float, true> : &convert_kernel<float, false>)
          : (params.by_channels ? &convert_kernel<uint16_t, true>
                                : &convert_kernel<uint16_t, false>);
  return launch_on(kernel, filter_blocks, converts, params, stream);
}

}  // namespace

Status pack_filters(const PrepareParams& params, void* stream) noexcept {
  return launch_convert(params, false, stream);
}

Status prepare(const PrepareParams& params, void* stream) noexcept {
  if (Status status = launch_convert(params, params.x_planes != nullptr, stream);
      !status.ok() || params.planes == 0) {
    return status;
  }
  const int64_t rows = int64_t(params.images.count) * params.images.out_pixels();
  const auto kernel = params.by_channels ? &finish_kernel<true> : &finish_kernel<false>;
  return launch_on(kernel, ceil_div(rows, kThreads), true, params, stream);
}

}  // namespace cutfuse::conv::implicit
