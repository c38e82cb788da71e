/// \file
/// The batch_norm tail: statistics over the rows of z[M, N], one channel a column.
#pragma once

#include <cstdint>

#include "cutfuse/export.h"
#include "cutfuse/status.h"
#include "cutfuse/types.h"

namespace cutfuse {

/// Run-time arguments, all on the device; vectors have N elements and are contiguous.
/// With mean and var those of the batch (biased) in training, or running_mean and running_var:
///   y = (z - mean) / sqrt(var + eps) * weight + bias
/// In training the running statistics are updated as torch does, with f = momentum, or, if
/// momentum is negative (torch's None), f = 1 / (num_batches_tracked + 1):
///   running = (1 - f) * running + f * batch,  var unbiased (M / (M - 1)),
///   num_batches_tracked += 1.
struct BatchNormBuffers {
  const void* weight = nullptr;  ///< null: 1 (affine=False)
  const void* bias = nullptr;    ///< null: 0
  void* running_mean = nullptr;  ///< null: not tracked; read in eval, updated in training
  void* running_var = nullptr;
  DType affine_dtype = DType::kFloat32;    ///< of weight and bias
  DType running_dtype = DType::kFloat32;   ///< of running_mean and running_var
  int64_t* num_batches_tracked = nullptr;  ///< one element; null: not counted
  float* save_mean = nullptr;              ///< training output: batch mean
  float* save_invstd = nullptr;            ///< training output: 1 / sqrt(var + eps)
  double momentum = 0.1;
  double eps = 1e-5;
};

}  // namespace cutfuse
