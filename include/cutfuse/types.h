/// \file
/// Plain types that the contracts share.
#pragma once

#include <cstdint>

namespace cutfuse {

/// Element type of a tensor. Kernels compute in fp32 whatever it is.
enum class DType : int32_t {
  kFloat32 = 0,
  kFloat16 = 1,
  kBFloat16 = 2,
};

inline constexpr int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

/// Accuracy promised for fp32 tensors, against float64; see README.md, Precision.
enum class Precision : int32_t {
  kIeee = 0,  ///< at most max(PyTorch's own fp32 error, 2^-22)
  kTf32 = 1,  ///< at most max(PyTorch's TF32 error, 2^-10): both factors are rounded
};

/// A matrix of any strides, in elements: element (r, c) is data[r * row_stride + c * col_stride].
/// Strides may be zero or negative; the memory is read only.
struct ConstMatrix {
  const void* data = nullptr;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
  DType dtype = DType::kFloat32;
};

/// A row-major matrix that is written: element (r, c) is data[r * row_stride + c].
struct Matrix {
  void* data = nullptr;
  int64_t row_stride = 0;
  DType dtype = DType::kFloat32;
};

}  // namespace cutfuse
