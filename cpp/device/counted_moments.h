/// \file
/// Moments that say of how many values they are.
#pragma once

#include <cstdint>

namespace cutfuse {

struct alignas(16) CountedMoments {
  float mean;
  float m2;
  int64_t count;
};

}  // namespace cutfuse
