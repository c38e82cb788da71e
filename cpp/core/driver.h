/// \file
/// Driver entry points, resolved at run time: the library does not link libcuda.
#pragma once

#include <cuda.h>

#include <array>

#include "cutfuse/status.h"
#include "cutfuse/types.h"

namespace cutfuse {

/// Points an encoded tensor map at another address, aligned as the first one was.
Status replace_tensor_map_address(CUtensorMap* map, const void* address) noexcept;

/// A tensor map that stores boxes of box_rows x 64 bytes of columns (64-byte swizzle in shared
/// memory) to `count` matrices, `plane_stride` elements apart, of which `out` is the first; its
/// address and both strides are multiples of 16 bytes.
Status encode_output_map(const Matrix& out, int64_t rows, int64_t columns, int64_t count,
                         int64_t plane_stride, int box_rows, CUtensorMap* map) noexcept;

/// A tensor of fp32, of which boxes are read: dimensions from the one whose values are next to each
/// other on, strides in elements.
struct TensorBoxes {
  const void* data = nullptr;
  std::array<int64_t, 5> sizes = {}, strides = {};
  std::array<int32_t, 5> box = {};
  bool swizzled = false;  ///< boxes, 128 or 32 bytes wide, by those
  bool tf32 = false;      ///< values are rounded to TF32 on their way
};

/// Whether the strides and the address are such as a tensor map can have.
bool can_encode(const TensorBoxes& boxes) noexcept;

/// A tensor map that reads boxes; values outside of the tensor are zero.
Status encode_boxes(const TensorBoxes& boxes, CUtensorMap* map) noexcept;

/// Images [image][height][width][channels] of 16-bit values, of which a box has 64 channels of
/// `box_pixels` pixels. Those are walked over line by line and image by image, from the lower
/// corner on, by the strides, up to but without size + upper corner; pixels outside of the image
/// are zero.
struct ImageBoxes {
  const void* data = nullptr;  ///< a multiple of 16 bytes
  DType dtype = DType::kFloat16;
  int64_t channels = 0, width = 0, height = 0, images = 0;
  int64_t pixel_stride = 0;          ///< elements, a multiple of 8
  int32_t lower_w = 0, lower_h = 0;  ///< corners: -128 to 127
  int32_t upper_w = 0, upper_h = 0;
  int32_t stride_w = 1, stride_h = 1;  ///< 1 to 8
  int32_t box_pixels = 0;
};

/// A tensor map that reads such boxes (128-byte swizzle in shared memory).
Status encode_images(const ImageBoxes& boxes, CUtensorMap* map) noexcept;

}  // namespace cutfuse
