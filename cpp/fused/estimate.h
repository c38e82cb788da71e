/// \file
/// Expected times of a fused problem.
#pragma once

#include "fused/plan.h"

namespace cutfuse::fused {

/// Bytes a microsecond.
inline constexpr double kBandwidth = 3.4e6;
/// Of one more kernel in a graph.
inline constexpr double kLaunch = 2.5;

/// A tile's products.
double contraction_time(const GemmProblem& problem, const GemmPolicy& policy);

/// What batch norm within the contraction takes off a call, of what passes of their own would take.
double exchange_gain(const FusedProblem& problem, const GemmPolicy& policy,
                     const DeviceProps& device);

/// Microseconds of a call that why_not() accepts, here; of planes that come through links, without
/// what writes them.
double expected(const FusedProblem& problem, const Links& links, const DeviceProps& device);

}  // namespace cutfuse::fused
