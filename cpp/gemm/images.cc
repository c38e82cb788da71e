/// \file
#include "gemm/images.h"

namespace cutfuse::gemm {

ImageBoxes boxes_of(const Images& images, const void* data, int32_t planes, DType element,
                    int32_t rows) noexcept {
  const auto upper = [](int32_t out, int32_t stride, int32_t pad, int32_t size) {
    return (out - 1) * stride + 1 - pad - size;
  };
  ImageBoxes boxes;
  boxes.data = data;
  boxes.dtype = element;
  boxes.channels = images.channels;
  boxes.width = images.width;
  boxes.height = images.height;
  boxes.images = int64_t(planes) * images.count;
  boxes.pixel_stride = images.pixel_stride;
  boxes.lower_w = -images.pad_w;
  boxes.lower_h = -images.pad_h;
  boxes.upper_w = upper(images.out_width, images.stride_w, images.pad_w, images.width);
  boxes.upper_h = upper(images.out_height, images.stride_h, images.pad_h, images.height);
  boxes.stride_w = images.stride_w;
  boxes.stride_h = images.stride_h;
  boxes.box_pixels = rows;
  return boxes;
}

TensorBoxes pixel_boxes_of(const Images& images, const void* data, bool tf32) noexcept {
  const int64_t pixels = images.out_pixels();
  const int32_t step = images.box_step();
  TensorBoxes boxes;
  boxes.data = data;
  boxes.sizes = {step * pixels, images.channels / step, images.count, 1, 1};
  boxes.strides = {1, step * pixels, pixels * images.channels, 0, 0};
  boxes.box = {images.box_pixels(), 32 / step, 1, 1, 1};
  boxes.swizzled = step == 1;
  boxes.tf32 = tf32;
  return boxes;
}

}  // namespace cutfuse::gemm
