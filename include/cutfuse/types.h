/// \file
/// Plain types that the contracts share.
#pragma once

#include <cstdint>

namespace cutfuse {

/// Accuracy promised against float64; see README.md, Precision.
enum class Precision : int32_t {
  kIeee = 0,  ///< at most max(PyTorch's own fp32 error, 2^-22)
};

/// An fp32 matrix of any strides, in elements: element (r, c) is data[r * row_stride + c *
/// col_stride]. Strides may be zero or negative; the memory is read only.
struct ConstMatrix {
  const float* data = nullptr;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
};

/// A row-major fp32 matrix that is written: element (r, c) is data[r * row_stride + c].
struct Matrix {
  float* data = nullptr;
  int64_t row_stride = 0;
};

}  // namespace cutfuse
