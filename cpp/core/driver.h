/// \file
/// Driver entry points, resolved at run time: the library does not link libcuda.
#pragma once

#include <cuda.h>

#include "cutfuse/status.h"
#include "cutfuse/types.h"

namespace cutfuse {

/// Points an encoded tensor map at another address, aligned as the first one was.
Status replace_tensor_map_address(CUtensorMap* map, const void* address) noexcept;

/// A tensor map that stores boxes of box_rows x box_columns (64 bytes of columns, 64-byte swizzle
/// in shared memory) to `out`, whose row stride and address are multiples of 16 bytes.
Status encode_output_map(const Matrix& out, int64_t rows, int64_t columns, int box_rows,
                         int box_columns, CUtensorMap* map) noexcept;

}  // namespace cutfuse
