#include "program/apply.h"

#include "core/launch.h"
#include "core/status.h"
#include "program/executor.cuh"
#include "program/row_tile.cuh"

namespace cutfuse {
namespace {

using namespace row_tile;  // NOLINT: this file is one pass over row tiles

template <bool kVectorIn, bool kVectorOut>
__global__ void __launch_bounds__(kLanes* kWarps)
    apply_kernel(const __grid_constant__ DeviceProgram program, const Matrix slices, int32_t count,
                 int64_t slice_stride, const Matrix out, int64_t rows, int64_t columns) {
  wait_for_previous_kernels();
  Coordinates at{0, (int64_t(blockIdx.x) * kLanes + threadIdx.x % kLanes) * kColumns, columns};
  for_each_piece(rows, [&](int64_t row0) {
    at.row0 = row0;
    float v[Coordinates::kSize];
    load<kVectorIn>(slices, at, v);
    for (int32_t s = 1; s < count; ++s) {
      const Matrix slice = {static_cast<float*>(slices.data) + s * slice_stride, slices.row_stride};
      float more[Coordinates::kSize];
      load<kVectorIn>(slice, at, more);
#pragma unroll
      for (int i = 0; i < Coordinates::kSize; ++i) v[i] += more[i];
    }
    execute(program, v, at);
    store<kVectorOut>(out, at, v);
  });
}

}  // namespace

Status apply(const DeviceProgram& program, const Matrix& slices, int32_t count,
             int64_t slice_stride, const Matrix& out, int64_t rows, int64_t columns,
             int32_t sm_count, void* stream) noexcept {
  if (columns > kMaxColumns) {
    return error(Code::kNotSupported, "a result of %lld columns: at most %lld are supported",
                 static_cast<long long>(columns), static_cast<long long>(kMaxColumns));
  }
  const bool in = allows_vectors(slices, columns) && slice_stride % 4 == 0;
  const auto kernel = !in                            ? apply_kernel<false, false>
                      : allows_vectors(out, columns) ? apply_kernel<true, true>
                                                     : apply_kernel<true, false>;
  return launch(kernel, grid(rows, columns, sm_count), kLanes * kWarps, 0, stream, program, slices,
                count, slice_stride, out, rows, columns);
}

}  // namespace cutfuse
