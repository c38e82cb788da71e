/// \file
/// The affine step of batch norm as a kernel sees it.
#pragma once

namespace cutfuse {

/// y = (v - mean) * invstd * weight + bias, one value a column. Null mean: no step. With null
/// invstd it is 1 / sqrt(var + eps); null weight is 1, null bias 0.
struct Normalise {
  const float* mean = nullptr;
  const float* invstd = nullptr;
  const float* var = nullptr;
  const float* weight = nullptr;
  const float* bias = nullptr;
  float eps = 0.f;
};

}  // namespace cutfuse
