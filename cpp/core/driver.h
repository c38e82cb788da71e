/// \file
/// Driver entry points, resolved at run time: the library does not link libcuda.
#pragma once

#include <cuda.h>

#include "cutfuse/status.h"

namespace cutfuse {

/// Points an encoded tensor map at another address, aligned as the first one was.
Status replace_tensor_map_address(CUtensorMap* map, const void* address) noexcept;

}  // namespace cutfuse
