// Tensor maps, as copies.cc reads them.
#pragma once

#include <cstdint>

namespace emulated {

/// A tensor map's 128 bytes, in our own order.
struct TensorMap {
  uint64_t address;
  uint64_t strides[4];  // bytes, of the dimensions from 1 on
  uint32_t sizes[5];
  uint16_t box[5];   // im2col: channels, pixels
  uint8_t steps[5];  // im2col: of the image's dimensions
  int8_t lower[2], upper[2];
  uint8_t rank, element, swizzle_mask, images;
  bool rounds;  // fp32 to TF32, as it is loaded
};
static_assert(sizeof(TensorMap) <= 128);

}  // namespace emulated
