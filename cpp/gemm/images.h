/// \file
/// An operand A whose rows are taken from images: of each result pixel of a convolution, what its
/// filter meets. Nothing of it exists in memory.
///
/// Row m is pixel (p, q) of image n, m = (n * out_height + p) * out_width + q. Column k is of tap
/// (r, s) and channel c, k = (r * kernel_w + s) * tap_channels() + c, so that a k-tile is of one
/// tap.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/driver.h"
#include "cutfuse/types.h"

namespace cutfuse::gemm {

inline constexpr int32_t kTapAlignment = 64;  // channels: a k-tile
inline constexpr int32_t kPixelGroup = 32;

struct Images {
  int32_t count = 0;
  int32_t channels = 0;
  int32_t height = 0;
  int32_t width = 0;
  int32_t out_height = 0;
  int32_t out_width = 0;
  int32_t kernel_h = 1;
  int32_t kernel_w = 1;
  int32_t stride_h = 1;
  int32_t stride_w = 1;
  int32_t pad_h = 0;  ///< zeros above; below as many as out_height needs
  int32_t pad_w = 0;
  int32_t dilation_h = 1;
  int32_t dilation_w = 1;
  int64_t pixel_stride = 0;  ///< elements between pixels of a plane of A, a multiple of 8
  /// The result's planes lie one channel after the other, each out_height * out_width long (NCHW);
  /// else the result is a row-major matrix.
  bool planes_out = false;
  /// x is fp32 and lies so as well, without gaps; the filter is 1x1 at stride 1. Rows of A are then
  /// whole groups of kPixelGroup pixels of an image, and those past its end are nothing.
  bool planes_in = false;

  __host__ __device__ int32_t taps() const { return kernel_h * kernel_w; }
  __host__ __device__ int32_t out_pixels() const { return out_height * out_width; }
  /// Rows of A that an image has.
  __host__ __device__ int32_t image_rows() const {
    const int32_t pixels = out_pixels();
    return planes_in ? (pixels + kPixelGroup - 1) / kPixelGroup * kPixelGroup : pixels;
  }
  /// Where planes_in, channels whose planes end on 16 bytes together, as the copy engine's strides
  /// must: a box of A is of every such channel, and box_pixels() wide.
  __host__ __device__ int32_t box_step() const { return out_pixels() % 4 == 0 ? 1 : 4; }
  __host__ __device__ int32_t box_pixels() const { return kPixelGroup + (box_step() == 1 ? 0 : 4); }
  __host__ __device__ int32_t tap_channels() const {
    return (channels + kTapAlignment - 1) / kTapAlignment * kTapAlignment;
  }
};

/// Where a row's filter begins: a pixel of x, or of the padding before it.
struct FirstTap {
  int32_t image, h, w;
};
__host__ __device__ inline FirstTap first_tap(const Images& images, int32_t row) {
  const int32_t line = row / images.out_width;
  const int32_t image = line / images.out_height;
  return {image, (line - image * images.out_height) * images.stride_h - images.pad_h,
          (row - line * images.out_width) * images.stride_w - images.pad_w};
}

/// What a tensor map says of `planes` planes at `data`, of whose pixels a tile has `rows`: the copy
/// engine walks over those that a filter begins at, as many as there are results.
ImageBoxes boxes_of(const Images& images, const void* data, int32_t planes, DType element,
                    int32_t rows) noexcept;

/// The same where x lies in planes, seen as rows of box_step() of them: a box has box_pixels()
/// pixels of each box_step()-th of 32 channels, rounded to TF32 if that is asked for. Boxes of
/// every channel are swizzled, 128 bytes of each; others are longer than that. Pixels past a
/// plane's end are the next plane's, or zeros.
TensorBoxes pixel_boxes_of(const Images& images, const void* data, bool tf32) noexcept;

/// Where a row's results lie, of which image `n` begins n * columns planes after the first.
struct PlanePixel {
  int64_t offset;  ///< of the first plane; of a row that is nothing, that of a pixel beside it
  bool is_inside;
};
__host__ __device__ inline PlanePixel plane_pixel(const Images& images, int32_t row,
                                                  int32_t columns) {
  const int32_t pixels = images.out_pixels();
  const int32_t rows = images.image_rows();
  const int32_t image = row / rows;
  const int32_t pixel = row - image * rows;
  const int64_t first = int64_t(image < images.count ? image : images.count - 1) * columns;
  return {first * pixels + (pixel < pixels ? pixel : pixels - 1),
          image < images.count && pixel < pixels};
}

}  // namespace cutfuse::gemm
