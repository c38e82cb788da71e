#pragma once

#include "machine.h"

namespace cutfuse {

inline void sync_threads(int name, int threads) { emulated::meet_named(name, threads, true); }

}  // namespace cutfuse
