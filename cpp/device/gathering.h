/// \file
#pragma once

#include <cstdint>

namespace cutfuse {

/// What the blocks of a launch have agreed on: whether all of them run at the same time, so that
/// they may wait for each other.
enum class Gathering : uint32_t { kOpen = 0, kTogether = 1, kApart = 2 };

}  // namespace cutfuse
