/// \file
/// Partials of a logsumexp as they lie in memory.
#pragma once

namespace cutfuse {

/// The largest of some values, and the sum of exp(value - shift) with shift = max, or 0 where max
/// is infinite. A NaN among the values makes the sum NaN.
struct alignas(8) LogSumExpPartial {
  float max;
  float sum;
};

}  // namespace cutfuse
