/// \file
/// Epilogue of the sm_80 GEMM on a thread's accumulators: undo the split's scales, repair
/// non-finite rows and columns, run the program, store the result and its reductions' partials.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "device/values.cuh"
#include "gemm/coordinates.cuh"
#include "gemm/images.cuh"
#include "gemm/launcher.h"
#include "gemm/repair.cuh"
#include "gemm/sm80/instructions.cuh"
#include "gemm/sm80/operands.h"
#include "gemm/sm80/partials.cuh"
#include "gemm/sm80/shape.h"
#include "gemm/stage.cuh"
#include "gemm/store.cuh"
#include "gemm/unscale.cuh"
#include "program/executor.cuh"

namespace cutfuse::gemm::sm80 {

template <class Shape>
using Coordinates = FragmentCoordinates<Shape::kWarpM / 8, Shape::kWarpN / 8, Shape::kTileN, 29>;

/// Bytes of shared memory that the epilogue overwrites.
template <class Shape>
constexpr int epilogue_bytes() {
  constexpr int kStaged = kSlots<Coordinates<Shape>> * Shape::kTileN * 4;
  constexpr int kPartials =
      8 * std::max(Shape::kWarpsM * Shape::kTileN, Shape::kWarpsN * Shape::kTileM);
  return std::max(kStaged, kPartials);
}

/// Bounded values as fp16 planes at kBoundedExponent: what the next contraction reads. Its rows
/// start at multiples of 16 bytes.
template <class Shape>
__device__ __forceinline__ void store_planes(float (&v)[Shape::kSize], const Coordinates<Shape>& at,
                                             Matrix out, int planes, int64_t plane_stride) {
#pragma unroll
  for (int i = 0; i < Shape::kSize; ++i) v[i] *= 1 << kBoundedExponent;
  store_directly(v, at, out, true);
  if (planes == 2) {
    out.data = static_cast<uint16_t*>(out.data) + plane_stride;
#pragma unroll
    for (int i = 0; i < Shape::kSize; i += 2) {
      const float2 hi = unpack_pair(pack_pair(v[i], v[i + 1], DType::kFloat16), DType::kFloat16);
      v[i] -= hi.x;
      v[i + 1] -= hi.y;
    }
    store_directly(v, at, out, true);
  }
}

/// What becomes of part `part` of K's sums; a part beyond the first is stored one matrix further.
template <class Shape>
__device__ __forceinline__ void run_epilogue(const EpilogueArguments& arguments,
                                             const Operands& operands, Tile tile, int tiles_n,
                                             int part, unsigned char* shared,
                                             float (&v)[Shape::kSize]) {
  static_assert(epilogue_bytes<Shape>() <= Shape::kSharedBytes);
  constexpr bool kImages = Shape::kSource == Source::kImages;
  using Fragment = Coordinates<Shape>;
  using At = std::conditional_t<kImages, ImageCoordinates<Fragment>, Fragment>;
  const int rows = operands.m;
  const int columns = operands.n;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int warp_column = warp % Shape::kWarpsN * Shape::kWarpN + lane % 4 * 2;
  const Fragment fragment{tile.m * Shape::kTileM + warp / Shape::kWarpsN * Shape::kWarpM + lane / 4,
                          tile.n * Shape::kTileN + warp_column, rows, columns,
                          shared_address(shared) + warp_column * 4};
  const At at = [&]() -> At {
    if constexpr (kImages) {
      return {fragment, &operands.images};
    } else {
      return fragment;
    }
  }();
  int row_words[At::kRows];
  bool rows_plain = true;
#pragma unroll
  for (int r = 0; r < At::kRows; ++r) {
    row_words[r] = arguments.a_words != nullptr ? __ldg(arguments.a_words + at.row(r))
                                                : 2 * arguments.a_exponent;
    rows_plain &= is_plain(row_words[r]);
  }
  const auto all = [](bool mine) { return bool(__syncthreads_and(mine)); };
  const bool columns_plain = stage_columns<At, Shape::kTileN, Shape::kThreads>(
      arguments, tile.n * Shape::kTileN, columns, all(rows_plain), thread,
      reinterpret_cast<int32_t*>(shared), all);
  if (columns_plain && __all_sync(0xffffffffu, rows_plain)) {
    apply_folded(v, row_words, at, kScaleSlot<At>);
    execute(arguments.program, v, at, arguments.affine_steps);
  } else {
    if (arguments.b_words != nullptr && unscale(v, row_words, at)) {
      repair(v, at, arguments, lane);
    }
    execute(arguments.program, v, at);
  }
  if (arguments.row_partials != nullptr) {
    __syncthreads();  // the slots are read
    store_row_partials<Shape>(v, at, tile, tiles_n, reinterpret_cast<LogSumExpPartial*>(shared),
                              arguments.row_partials);
    return;
  }
  bool to_planes = false;
  if constexpr (kImages) {
    to_planes = operands.images.planes_out;
    if (to_planes) store_to_planes(v, at, arguments.out);
  }
  const int64_t plane_stride = rows * arguments.out.row_stride;
  if (to_planes) {
  } else if (arguments.out_planes != 0) {
    store_planes<Shape>(v, at, arguments.out, arguments.out_planes, plane_stride);
  } else {
    Matrix out = arguments.out;
    out.data = static_cast<char*>(out.data) + part * plane_stride * size_of(out.dtype);
    store_directly(v, at, out, arguments.out_pairs);
  }
  if (arguments.partials != nullptr) {
    __syncthreads();  // the slots are read
    store_moments<Shape>(v, at, tile, reinterpret_cast<Moments*>(shared), arguments.partials,
                         arguments.partial_count);
  }
}

}  // namespace cutfuse::gemm::sm80
