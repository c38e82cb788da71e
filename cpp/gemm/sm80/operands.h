/// \file
/// What the sm_80 mainloop reads.
#pragma once

#include <cstdint>

#include "gemm/images.h"

namespace cutfuse::gemm::sm80 {

/// A and B as the kernel reads them; the second plane lies `*_plane` bytes behind the first.
struct Operands {
  const char* a = nullptr;
  const char* b = nullptr;
  int64_t a_leading = 0;  ///< bytes between rows
  int64_t b_leading = 0;
  int64_t a_plane = 0;
  int64_t b_plane = 0;
  int32_t m = 0, n = 0, k = 0;
  int32_t part_tiles = 0;  ///< k-tiles of one part of K, which is all of it for images
  float promotion = 1.f;   ///< factor of every third k-tile
  float promotion2 = 1.f;  ///< and of the others, 2 * promotion - 1
  Images images;           ///< that A's rows are taken from; a_leading lies between pixels then
};

}  // namespace cutfuse::gemm::sm80
