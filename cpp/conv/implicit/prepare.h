/// \file
/// What the GEMM on images reads, made of tensors as the user has them: planes of pixels whose
/// channels lie side by side, filters in the order of its k-tiles, and their words.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "conv/shift/geometry.h"
#include "cutfuse/conv.h"
#include "cutfuse/status.h"
#include "gemm/images.h"

namespace cutfuse::conv::implicit {

/// Largest finite magnitude of a part of an image, as the bits of its absolute value (ordered like
/// the values), and whether something there is not finite.
struct Measured {
  uint32_t bits;
  uint32_t nonfinite;
};

/// Of a part, which is a number of tiles: pixels and channels. A block converts a part.
inline constexpr int kTilePixels = 32;
inline constexpr int kTileChannels = 64;
inline constexpr int kResidentBlocks = 4;  // of a multiprocessor

struct PrepareParams {
  gemm::Images images;
  int32_t planes = 0;  ///< of fp32; 0: 16-bit values as they are

  ConstTensor4 x;
  int32_t parts = 0;             ///< of an image, converted by a block each
  Measured* measured = nullptr;  ///< [image][part]
  int32_t* guesses = nullptr;    ///< [image]: the exponent that its parts were converted with
  void* x_planes = nullptr;      ///< [plane][image][pixel][images.pixel_stride]
  int32_t* row_words = nullptr;  ///< of result pixels, as split() writes those of rows

  /// [filter][channel][row][tap], any strides. Null data: the filters are packed already.
  ConstTensor4 weight;
  int32_t filters = 0;
  void* filter_planes = nullptr;    ///< [plane][filter][tap][images.tap_channels()]
  int32_t* filter_words = nullptr;  ///< of fp32

  // Of their strides, see with_strides():
  shift::Divisor line;            ///< pixels that lie strides[3] apart
  bool by_fours = false;          ///< channels lie side by side and may be read four at once
  bool filters_by_fours = false;  ///< as x
};

/// Packs the filters alone.
Status pack_filters(const PrepareParams& params, void* stream) noexcept;

/// Packs filters and pixels. An image has one exponent, as a filter meets every pixel of it. It is
/// guessed from a thousand elements, so that x is read once; an image with elements 16 times as
/// large, or none but zeros among those, is converted again.
Status prepare(const PrepareParams& params, void* stream) noexcept;

}  // namespace cutfuse::conv::implicit
