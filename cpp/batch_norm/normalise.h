/// \file
/// The affine step of batch norm as the normalise pass sees it.
#pragma once

namespace cutfuse {

/// y = (v - mean) * invstd * weight + bias, one value a column; null weight is 1, null bias 0.
struct Normalise {
  const float* mean = nullptr;
  const float* invstd = nullptr;
  const float* weight = nullptr;
  const float* bias = nullptr;
};

}  // namespace cutfuse
