/// \file
/// What PyTorch is expected to take for a convolution.
#pragma once

#include "cutfuse/conv.h"

namespace cutfuse::conv {

/// Microseconds that PyTorch needs at least, for nine convolutions of ten; often it takes several
/// times as long.
double estimate_eager(const FusedConvProblem& problem) noexcept;

}  // namespace cutfuse::conv
