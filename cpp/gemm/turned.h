/// \file
/// A linear layer turned over: rows of A are those of the fp32 weight as they are.
#pragma once

#include <cstdint>

#include "core/driver.h"
#include "cutfuse/types.h"

namespace cutfuse::gemm {

inline constexpr int32_t kTurnedBox = 32;  // elements of a row in a box
inline constexpr int32_t kTurnedRow = kTurnedBox * sizeof(float);

/// What a tensor map says of a matrix of fp32 rows, of which a box has `box_rows`.
inline TensorBoxes turned_boxes(const ConstMatrix& weight, int64_t rows, int64_t k,
                                int32_t box_rows) noexcept {
  TensorBoxes boxes;
  boxes.data = weight.data;
  boxes.sizes = {k, rows, 1, 1, 1};
  boxes.strides = {weight.col_stride, weight.row_stride, 0, 0, 0};
  boxes.box = {kTurnedBox, box_rows, 1, 1, 1};
  boxes.swizzled = true;
  return boxes;
}

}  // namespace cutfuse::gemm
