/// \file
/// fp32 matrix -> scaled fp16 planes, the operands of a tensor-core product: two planes for fp32
/// accuracy, one for that of TF32, whose significand has the same 11 bits.
#pragma once

#include <cstdint>

#include "cutfuse/device.h"
#include "cutfuse/export.h"
#include "cutfuse/status.h"
#include "cutfuse/types.h"

namespace cutfuse {

/// Planes of a matrix of `rows` x `k`: fp16 [count][rows][leading], plane 0 = hi, plane 1, if there
/// are two, = lo; columns k .. leading-1 are zero. With e the row's exponent,
///   hi = fp16(x * 2^e),  lo = fp16(x * 2^e - hi),  x ~ (hi + lo) * 2^-e  (22 bits of significand).
/// e puts the row's largest finite magnitude in [2^14, 2^15); 0 for a row of zeros. A non-finite
/// element is zero in the planes; the row's word tells that one was there.
struct PlanesLayout {
  int64_t leading = 0;      ///< elements between rows: k rounded up to a multiple of 8 (16 bytes)
  int64_t plane_bytes = 0;  ///< bytes of all planes
  int64_t word_bytes = 0;   ///< bytes of the row words, int32 [rows] padded to 4
};

/// One int32 per row: 2 * exponent + (1 if the row has an element that is not finite).
inline constexpr int32_t row_exponent(int32_t word) { return word >> 1; }
inline constexpr bool row_has_nonfinite(int32_t word) { return (word & 1) != 0; }

/// Sizes of the planes of a rows x k matrix. kInvalidValue if either is negative, `count` is
/// neither 1 nor 2, or a size overflows 63 bits.
CUTFUSE_API Status planes_layout(int64_t rows, int64_t k, int32_t count,
                                 PlanesLayout* layout) noexcept;

/// Writes `count` planes and row words of `x` (fp32, rows x k, any strides) on `stream` of
/// `device`. `planes` is 16-byte aligned and at least layout.plane_bytes, `words` at least
/// layout.word_bytes; neither overlaps x. Reads x once when its rows are contiguous and k <= 8192,
/// else twice. Deterministic; no host synchronisation; safe in CUDA graphs.
CUTFUSE_API Status split(const ConstMatrix& x, int64_t rows, int64_t k, int32_t count, void* planes,
                         int32_t* words, const DeviceProps& device, void* stream) noexcept;

}  // namespace cutfuse
