/// \file
/// The stages of the batch_norm tail: in training, merge partials, then normalise in place; in
/// eval, fold the running statistics for the epilogue.
#pragma once

#include <cstdint>

#include "cutfuse/batch_norm.h"
#include "cutfuse/status.h"
#include "cutfuse/types.h"
#include "device/counted_moments.h"
#include "device/moments.h"
#include "program/device_program.h"

namespace cutfuse::batch_norm {

/// A result by its columns: value r of column c is element c * column_stride + r / together * jump
/// + r % together * row_stride.
struct Columns {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t column_stride = 1;
  int64_t row_stride = 0;
  int64_t together = 1;
  int64_t jump = 0;
};

/// `count` moments of each column, each of `rows` rows, the last of what is left: the first of
/// column c at data + c * column_stride. Where finalise() merges them they are [columns][count].
struct Partials {
  const Moments* data = nullptr;
  int64_t count = 0;
  int32_t rows = kPartialRows;
  int64_t column_stride = 0;
  int64_t stride = 1;
  const uint32_t* gathering = nullptr;  ///< a Gathering; kTogether: nothing is left to do
};

/// Merges `partials` of `rows` rows into save_mean and save_invstd and updates the running
/// statistics; the count of batches is read here and raised by normalise(). The partials are of
/// values before or after they were rounded to be `stored`: where a column's deviation is small
/// beside its mean it is measured anew.
Status finalise(const Partials& partials, int64_t rows, int64_t columns, const Columns& stored,
                const BatchNormBuffers& buffers, void* stream) noexcept;

/// As above for partials [channels][partial_count] that are counted; raises *num_batches_tracked by
/// one. Also writes multipliers [channels], weight / sqrt(var + eps).
Status finalise(const CountedMoments* partials, int64_t partial_count, int64_t channels,
                const BatchNormBuffers& buffers, float* multipliers, void* stream) noexcept;

/// out = after(y) in place, with y of BatchNormBuffers from the statistics in `partials`: few of
/// them are merged in the same launch, many by finalise(). Raises *num_batches_tracked by one.
Status normalise(const Matrix& out, int64_t rows, int64_t columns, const Partials& partials,
                 const BatchNormBuffers& buffers, const DeviceProgram& after, int32_t sm_count,
                 void* stream) noexcept;

/// A contiguous NCHW result.
struct Planes {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t images = 0, channels = 0, pixels = 0;
};

/// As normalise(), of a result whose rows are the pixels of all images.
Status normalise_planes(const Planes& planes, const Moments* partials, int64_t partial_count,
                        const BatchNormBuffers& buffers, const DeviceProgram& after,
                        void* stream) noexcept;

}  // namespace cutfuse::batch_norm
