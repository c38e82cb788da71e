/// \file
/// The patch kernel's parameters, and the handle that launches it. No CUTLASS here.
///
/// A warpgroup's tile is a block of output pixels of one image. What their filters meet of x, a
/// patch, comes to shared memory as NCHW has it, by the copy engine in one box where it can; each
/// thread takes the values of its pixels from there to registers, splits them into fp16 planes, and
/// multiplies. The weights of all output channels stay in shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "conv/shift/params.h"
#include "cutfuse/device.h"
#include "cutfuse/status.h"
#include "gemm/launcher.h"

namespace cutfuse::conv::patches {

inline constexpr int32_t kGroups = 3;      // warpgroups of a block, each with tiles of its own
inline constexpr int32_t kPixels = 64;     // of a tile
inline constexpr int32_t kSlab = 64;       // terms of a sum whose weights lie together
inline constexpr int32_t kRowBytes = 128;  // of a row of a slab's plane, swizzled by those
// Terms: shorter sums are promoted every 16 terms, and every 32; longer ones of many tiles
// every 64.
inline constexpr int32_t kShort = 128, kMiddling = 256;

/// Of a tile, or from one to another.
struct Position {
  int32_t image, tile;  // of its image
};

/// Columns of the output that are cut into blocks of one shape.
struct Part {
  int32_t column = 0;       // the first
  int32_t first = 0;        // tile of an image
  int32_t block_w_log = 0;  // of a tile's pixels
  int32_t blocks_w = 0, blocks_h = 0;
  int32_t box_w = 0, box_h = 0;  // of a patch, in values of x
  shift::Divisor line;           // blocks_w

  constexpr int32_t block_w() const { return 1 << block_w_log; }
  constexpr int32_t block_h() const { return kPixels >> block_w_log; }
  constexpr int32_t tiles() const { return blocks_w * blocks_h; }
};

/// A convolution in one group, cut into tiles.
struct Geometry {
  int32_t batch, channels, height, width;
  int32_t out_channels, out_height, out_width;
  int32_t kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int32_t terms;  // of a sum: channels * kernel_h * kernel_w
  /// The second of narrower blocks, for columns that would leave most of a block empty; or of none.
  Part parts[2];
  int32_t tiles;   // of all images
  int32_t blocks;  // of the launch
  Position step;   // of a warpgroup, from tile to tile
  bool copied;     // value by value: rows of x do not begin at multiples of 16 bytes
  int32_t early;   // columns of a patch before the first that a filter meets

  constexpr int32_t taps() const { return kernel_h * kernel_w; }
  constexpr int32_t slabs() const { return (terms + kSlab - 1) / kSlab; }
  constexpr int32_t tiles_of_image() const { return parts[0].tiles() + parts[1].tiles(); }
  constexpr Position position(int32_t tile) const {
    return {tile / tiles_of_image(), tile % tiles_of_image()};
  }
  /// Of a warpgroup. Of few PyTorch's error may be smaller: 2.8e-7 of 288 lognormal terms, where
  /// sums promoted every 64 had 5.0e-7 (H200).
  constexpr bool many_tiles() const { return tiles >= 16 * kGroups * blocks; }
  constexpr int32_t out_pixels() const { return out_height * out_width; }
  constexpr int32_t patch_values(const Part& part) const {
    return channels * part.box_h * part.box_w;
  }
  /// Of the larger part's.
  constexpr int32_t patch_bytes() const {
    const int32_t first = patch_values(parts[0]), second = patch_values(parts[1]);
    return ((first > second ? first : second) * 4 + 127) / 128 * 128;
  }
  /// Of the table of a part's terms.
  constexpr int32_t table_bytes() const { return slabs() * kSlab * 2; }
  constexpr int32_t tables() const { return parts[1].tiles() > 0 ? 2 : 1; }
};

/// Of planes of `columns` rows.
constexpr int32_t slab_bytes(int32_t columns, int32_t planes) {
  return planes * columns * kRowBytes;
}

struct PackParams {
  Geometry g = {};
  shift::WeightView weight;
  int32_t columns = 0;  // rows of a plane: output channels, and zeros
  int32_t planes = 0;
  void* packed = nullptr;
  int32_t* words = nullptr;  // [columns], as split() makes them
};

/// Packs the weight in one or two fp16 planes: each row of `columns` a sum's factors, in the order
/// that kernels read.
Status pack(const PackParams& params, void* stream) noexcept;

struct Params {
  CUtensorMap maps[2];  // of x, for each part: boxes are patches; not if they are copied
  Geometry g = {};
  /// As of shift::Params.
  bool x_is_complete = false;
  const void* packed = nullptr;
  /// Its a and b are x and the weight with its strides, read only to repair.
  gemm::EpilogueArguments epilogue;
  float promotion = 1.f;
};

/// One row of instances.cmake.
struct Instance {
  int32_t columns;                           // output channels at once
  int32_t planes;                            // 2: ieee, 1: tf32
  int64_t (*shared_bytes)(const Geometry&);  // of a block
  Status (*launch)(const Params&, const DeviceProps&, void* stream) noexcept;
};

const Instance* instances(int32_t* count) noexcept;

}  // namespace cutfuse::conv::patches
