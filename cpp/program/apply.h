/// \file
/// A program over a stored sum: the last pass of a contraction whose K was split.
#pragma once

#include <cstdint>

#include "cutfuse/status.h"
#include "cutfuse/types.h"
#include "program/device_program.h"

namespace cutfuse {

/// out = program(slices[0] + slices[1] + ...), fp32 slices of rows x columns, `slice_stride`
/// elements apart, added in that order.
Status apply(const DeviceProgram& program, const Matrix& slices, int32_t count,
             int64_t slice_stride, const Matrix& out, int64_t rows, int64_t columns,
             int32_t sm_count, void* stream) noexcept;

}  // namespace cutfuse
