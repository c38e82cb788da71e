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
};

/// Whether the strides and the address are such as a tensor map can have.
bool can_encode(const TensorBoxes& boxes) noexcept;

/// A tensor map that reads boxes; values outside of the tensor are zero.
Status encode_boxes(const TensorBoxes& boxes, CUtensorMap* map) noexcept;

}  // namespace cutfuse
