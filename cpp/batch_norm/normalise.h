/// \file
/// The affine step of batch norm as the normalise pass sees it.
#pragma once

#include "cutfuse/types.h"

namespace cutfuse {

/// y = (v - mean) * invstd * weight + bias, one value a column; null weight is 1, null bias 0.
struct Normalise {
  const float* mean = nullptr;
  const float* invstd = nullptr;
  const void* weight = nullptr;
  const void* bias = nullptr;
  DType affine_dtype = DType::kFloat32;
};

}  // namespace cutfuse
