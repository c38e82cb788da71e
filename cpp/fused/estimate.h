/// \file
/// Expected times of a fused problem.
#pragma once

#include "cutfuse/fused.h"

namespace cutfuse::fused {

/// Microseconds of a call that why_not() accepts, here.
double expected(const FusedProblem& problem, const DeviceProps& device);

}  // namespace cutfuse::fused
