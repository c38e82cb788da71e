/// \file
/// 64-bit index arithmetic that reports overflow instead of wrapping. Each function returns false,
/// and leaves *result as it was, if the exact result is not in [-2^63, 2^63).
#pragma once

#include <cstdint>

namespace cutfuse {

[[nodiscard]] inline bool checked_add(int64_t a, int64_t b, int64_t* result) noexcept {
  int64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) return false;
  *result = sum;
  return true;
}

[[nodiscard]] inline bool checked_multiply(int64_t a, int64_t b, int64_t* result) noexcept {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) return false;
  *result = product;
  return true;
}

/// ceil(value / divisor) for value >= 0 and divisor > 0; false for any other.
[[nodiscard]] inline bool checked_ceil_div(int64_t value, int64_t divisor,
                                           int64_t* result) noexcept {
  if (value < 0 || divisor <= 0) return false;
  *result = value / divisor + (value % divisor != 0 ? 1 : 0);
  return true;
}

/// The least multiple of `multiple` that is at least `value`, for value >= 0 and multiple > 0;
/// false for any other.
[[nodiscard]] inline bool checked_round_up(int64_t value, int64_t multiple,
                                           int64_t* result) noexcept {
  int64_t count = 0;
  return checked_ceil_div(value, multiple, &count) && checked_multiply(count, multiple, result);
}

}  // namespace cutfuse
