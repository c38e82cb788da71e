/// \file
/// The direct kernels' parameters, and what launches them. Sums are of fp32, one product after the
/// other, without tensor cores.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cutfuse/status.h"
#include "cutfuse/types.h"
#include "program/device_program.h"

namespace cutfuse::conv::direct {

inline constexpr int kThreads = 128;
inline constexpr int32_t kColumns = 4;             // of results that a thread has side by side
inline constexpr int32_t kPixelChannels = 32;      // in shared memory, of a pixel: as many banks
inline constexpr int64_t kSharedBytes = 48 << 10;  // that any device gives without being asked

/// Rows of results of a thread. At stride 2 four would read 11 rows of x and more, whose patch
/// leaves room for few threads.
constexpr int32_t rows_at(int32_t stride) { return stride == 1 ? 4 : 2; }
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// n / divisor for 0 <= n < 2^31 by a multiplication.
struct Divisor {
  int32_t divisor = 1;
  uint32_t multiplier = 0;  // 0: by one
  uint32_t shift = 0;

  Divisor() = default;
  explicit Divisor(int32_t d) : divisor(d) {
    if (d <= 1) return;
    uint32_t log = 0;
    while ((int64_t(1) << log) < d) ++log;
    multiplier = static_cast<uint32_t>((uint64_t(1) << (31 + log)) / uint32_t(d) + 1);
    shift = log - 1;
  }
  __host__ __device__ int32_t divide(int32_t n) const {
    const auto high = static_cast<uint32_t>(uint64_t(uint32_t(n)) * multiplier >> 32);
    return multiplier == 0 ? n : static_cast<int32_t>(high >> shift);
  }
  /// *n % divisor; *n becomes the quotient.
  __host__ __device__ int32_t take(int32_t* n) const {
    const int32_t quotient = divide(*n);
    const int32_t rest = *n - quotient * divisor;
    *n = quotient;
    return rest;
  }
};

/// Which pixel of x, in one direction, tap t has at result o: (o * down + origin + t * step) / up,
/// if that is whole and in the image.
struct Axis {
  int32_t size = 0, out_size = 0, taps = 1;
  int32_t down = 1, origin = 0, step = 1;
  Divisor up;

  /// -1: none.
  __host__ __device__ int32_t met(int32_t result, int32_t tap) const {
    const int32_t at = result * down + origin + tap * step;
    if (at < 0) return -1;
    const int32_t pixel = up.divide(at);
    return pixel * up.divisor == at && pixel < size ? pixel : -1;
  }
};

/// Weights w[group][k][c][r][s], k and c of one group; strides may be negative.
struct Filters {
  const void* data = nullptr;
  int64_t group = 0, k = 0, c = 0, r = 0, s = 0;
};

/// What a block of a window kernel has.
struct Tile {
  Divisor groups, features;           // features: output channels of each group
  Divisor row_groups, column_groups;  // of rows_at() x kColumns results, a thread's
  Divisor all_features;               // of all groups
  Divisor rows;                       // of results
  int32_t columns = 0;
  int32_t patch_rows = 0, patch_columns = 0;  // of x that they meet
  Divisor inside_rows, inside_columns;        // no fewer than those in the image
  // Of a row of a plane that is read, in fours or not, or written: powers of two.
  int32_t lanes = 1, four_lanes = 1, result_lanes = 1;
  int32_t pitch = 0;         // floats from a row of a plane's patch to the next
  int32_t patch_floats = 0;  // then weights, then results that are stored from there
  int32_t weight_floats = 0, result_floats = 0;
  int32_t items = 0;  // threads' pieces
  // Blocks.
  Divisor group_tiles, feature_tiles, row_tiles, column_tiles;
};

struct Params {
  const void* x = nullptr;
  int64_t x_strides[4] = {0, 0, 0, 0};
  Filters filters;
  void* out = nullptr;
  DType dtype = DType::kFloat32;
  int32_t batch = 0, groups = 0;
  Divisor channels;      // of x, of a group
  int32_t features = 0;  // of the result, of a group
  Axis rows, columns;
  bool channels_last = false;  // of out
  bool four_at_once = false;   // elements of x that follow each other are one aligned load
  bool stores_four = false;    // results too, each four of a row (NCHW)
  Tile tile;
  int64_t units = 0;  // of the kernel for any filter: threads
  int64_t blocks = 0;
  DeviceProgram program;

  __host__ __device__ int64_t pixels() const { return int64_t(rows.out_size) * columns.out_size; }
  __host__ __device__ int64_t all_features() const { return int64_t(groups) * features; }
};

/// Filters of 3x3, 5x5 or 7x7 at stride 1 or 2, whose weights and sums stay in registers: planes to
/// planes (NCHW), or pixels to pixels.
Status run_planes(const Params& params, void* stream) noexcept;
Status run_pixels(const Params& params, void* stream) noexcept;

/// Any filter, and either layout.
Status run_any(const Params& params, void* stream) noexcept;

}  // namespace cutfuse::conv::direct
