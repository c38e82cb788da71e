/// \file
/// Expected times of a fused problem.
#pragma once

#include "fused/plan.h"

namespace cutfuse::fused {

/// Microseconds of a call that why_not() accepts, here; of planes that come through links, without
/// what writes them.
double expected(const FusedProblem& problem, const Links& links, const DeviceProps& device);

}  // namespace cutfuse::fused
