/// \file
/// Expected times of a fused problem.
#pragma once

#include "fused/plan.h"

namespace cutfuse::fused {

/// Bytes a microsecond.
inline constexpr double kBandwidth = 3.4e6;
/// Of one more kernel in a graph.
inline constexpr double kLaunch = 2.5;

/// Microseconds of a tile's products.
double contraction_time(const GemmProblem& problem, const GemmPolicy& policy);

/// Microseconds of a call that why_not() accepts, here; of planes that come through links, without
/// what writes them.
double expected(const FusedProblem& problem, const Links& links, const DeviceProps& device);

/// The same by `policy`.
double expected(const FusedProblem& problem, const Links& links, const GemmPolicy& policy,
                const DeviceProps& device);

}  // namespace cutfuse::fused
