/// \file
/// What kernels that split are asked to do.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cutfuse/types.h"
#include "split/split.h"

namespace cutfuse::planes {

struct Planes {
  __half* hi;
  __half* lo;  // null: one plane
  int64_t leading;
  int32_t* words;
};

struct Source {
  ConstMatrix x;
  int64_t rows;
  int64_t k;
};

struct Work {
  Source source;
  Planes planes;
};

Work make_work(const SplitJob& job, int64_t k, int32_t count) noexcept;

/// Whether four elements of a row are read at once.
bool reads_vectors(const ConstMatrix& x) noexcept;

}  // namespace cutfuse::planes
