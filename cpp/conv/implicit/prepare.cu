/// \file
/// Two launches: filters are packed and pixels converted with a guessed exponent, then images whose
/// guess was wrong converted again and rows' words written. 16-bit values need the first alone.
#include "conv/implicit/prepare.h"

#include "conv/implicit/filters.cuh"
#include "conv/implicit/group.cuh"
#include "core/launch.h"

namespace cutfuse::conv::implicit {
namespace {

constexpr int kGroups = kTileChannels / kGroup;  // 128 bytes of a plane
constexpr int kSamples = 1024;                   // that an exponent is guessed from
constexpr uint32_t kGolden = 0x9e3779b9;         // its multiples are spread evenly over 2^32
constexpr int kHeadroom = 4;                     // exponents above the largest of those
constexpr int32_t kNoGuess = INT32_MIN;          // nothing but zeros were sampled

__device__ int64_t offset_of(const PrepareParams& p, int32_t pixel) {
  const int32_t row = p.line.divide(pixel);
  const auto in_row = pixel - row * static_cast<int32_t>(p.line.divisor);
  return row * p.x.strides[2] + in_row * p.x.strides[3];
}

/// The exponent that an image is converted with before it was read. By one block.
__device__ int32_t guess(const PrepareParams& p, int32_t image) {
  const gemm::Images& images = p.images;
  const auto pixels = static_cast<uint32_t>(images.height * images.width);
  const auto* x = static_cast<const float*>(p.x.data) + image * p.x.strides[0];
  Magnitude magnitude;
#pragma unroll
  for (int i = 0; i < kSamples / kThreads; ++i) {
    const uint32_t sample = i * kThreads + threadIdx.x;
    const auto channel = static_cast<int32_t>(uint64_t(sample) * images.channels / kSamples);
    const auto pixel = static_cast<int32_t>(__umulhi(sample * kGolden, pixels));
    magnitude.add(__ldg(x + channel * p.x.strides[1] + offset_of(p, pixel)));
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

/// The tiles of a part, with the exponent that `exponent_of` returns once it is needed. Returns
/// what was read.
template <int kPlanes, bool kByChannels, class ExponentOf>
__device__ Magnitude convert_part(const PrepareParams& p, int32_t image, int32_t part,
                                  const ExponentOf& exponent_of) {
  using Value = ValueOf<kPlanes>;
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
    load_group(x + offset_of(p, pixel), p.x.strides[1], p.by_fours, images.channels,
               (at.channel_tile * kGroups + in_group) * kGroup, values);
  };
  Magnitude magnitude;
  int32_t exponent = 0;
  const auto convert = [&](const Walk& at, const Value(&values)[kGroup]) {
    uint4 hi, lo{};
    const bool finite = measure(values, magnitude);
    convert_group(values, exponent, finite, hi, lo);
    if constexpr (!kByChannels) {
      __syncthreads();
      staged[0][in_pixel][in_group] = hi;
      if (kPlanes == 2) staged[1][in_pixel][in_group] = lo;
      __syncthreads();
      hi = staged[0][out_pixel][out_group];
      if (kPlanes == 2) lo = staged[1][out_pixel][out_group];
    }
    const int32_t pixel = at.pixel_tile * kTilePixels + out_pixel;
    const int32_t channel = (at.channel_tile * kGroups + out_group) * kGroup;
    if (pixel >= pixels || channel >= stride) return;
    uint16_t* to = planes + pixel * stride + channel;
    *reinterpret_cast<uint4*>(to) = hi;
    if (kPlanes == 2) *reinterpret_cast<uint4*>(to + plane_stride) = lo;
  };
  // Two tiles in turns: one that were moved to the other's registers would be waited for.
  Walk at(p, part), next = at;
  Value even[kGroup], odd[kGroup];
  if (at.tile < at.end) load(at, even);
  exponent = exponent_of();
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

template <int kPlanes, bool kByChannels>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    convert_kernel(const __grid_constant__ PrepareParams p, int32_t filter_blocks) {
  wait_for_previous_kernels();
  // Filters last: they take less time than a part, whose end nothing else would fill.
  const auto block = static_cast<int32_t>(blockIdx.x);
  const int32_t parts = static_cast<int32_t>(gridDim.x) - filter_blocks;
  if (block >= parts) {
    pack_filters_of<kPlanes>(p, block - parts);
    return;
  }
  const int32_t image = block / p.parts;
  const int32_t part = block % p.parts;
  int32_t guessed = 0;
  Magnitude magnitude = convert_part<kPlanes, kByChannels>(p, image, part, [&] {
    if (kPlanes > 0) guessed = guess(p, image);
    return guessed == kNoGuess ? 0 : guessed;
  });
  if (kPlanes == 0) return;
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
template <int kPlanes, bool kByChannels>
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
  convert_part<kPlanes, kByChannels>(p, image, part,
                                     [&] { return planes::scale_exponent(whole.bits); });
}

/// Whether channels lie side by side and are aligned fours of floats.
bool reads_fours(const ConstTensor4& x, int64_t count, int64_t height, int64_t width) {
  const auto fours = [](int64_t size, int64_t stride) { return size == 1 || stride % 4 == 0; };
  return x.strides[1] == 1 && fours(count, x.strides[0]) && fours(height, x.strides[2]) &&
         fours(width, x.strides[3]) && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

PrepareParams with_strides(PrepareParams p) {
  const gemm::Images& images = p.images;
  const bool dense = images.height == 1 || p.x.strides[2] == images.width * p.x.strides[3];
  p.line = shift::Divisor(dense ? images.height * images.width : images.width);
  p.by_fours = reads_fours(p.x, images.count, images.height, images.width);
  p.filters_by_fours = reads_fours(p.weight, p.filters, images.kernel_h, images.kernel_w);
  return p;
}

/// Of `others` blocks and those that convert images' parts.
template <class Kernel>
Status launch_on(Kernel kernel, int64_t others, bool converts, const PrepareParams& params,
                 void* stream) {
  const int64_t blocks = others + (converts ? int64_t(params.images.count) * params.parts : 0);
  if (blocks == 0) return {};
  CUTFUSE_CHECK(blocks < int64_t(1) << 31, Code::kNotSupported,
                "converting takes %lld blocks, at most 2^31 - 1 are supported; split the batch",
                static_cast<long long>(blocks));
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, params,
                static_cast<int32_t>(others));
}

Status launch_convert(const PrepareParams& params, bool converts, void* stream) {
  const int64_t filter_blocks =
      params.weight.data != nullptr
          ? shift::ceil_div(params.filters, filters_of_block(params.images))
          : 0;
  void (*const kernels[3][2])(PrepareParams, int32_t) = {
      {&convert_kernel<0, false>, &convert_kernel<0, true>},
      {&convert_kernel<1, false>, &convert_kernel<1, true>},
      {&convert_kernel<2, false>, &convert_kernel<2, true>}};
  const auto kernel = kernels[params.planes][params.x.strides[1] == 1];
  return launch_on(kernel, filter_blocks, converts, params, stream);
}

}  // namespace

Status pack_filters(const PrepareParams& params, void* stream) noexcept {
  return launch_convert(with_strides(params), false, stream);
}

Status prepare(const PrepareParams& given, void* stream) noexcept {
  const PrepareParams params = with_strides(given);
  if (Status status = launch_convert(params, params.x_planes != nullptr, stream);
      !status.ok() || params.planes == 0) {
    return status;
  }
  const int64_t rows = int64_t(params.images.count) * params.images.out_pixels();
  void (*const kernels[2][2])(PrepareParams, int32_t) = {
      {&finish_kernel<1, false>, &finish_kernel<1, true>},
      {&finish_kernel<2, false>, &finish_kernel<2, true>}};
  const auto kernel = kernels[params.planes - 1][params.x.strides[1] == 1];
  return launch_on(kernel, shift::ceil_div(rows, kThreads), true, params, stream);
}

}  // namespace cutfuse::conv::implicit
