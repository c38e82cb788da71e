/// \file
/// The patch kernel: warpgroups that each load, multiply and store tiles of their own, so that one
/// stores while others multiply.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>
#include <cute/arch/copy_sm90_tma.hpp>

#include "conv/patches/params.h"
#include "conv/patches/sm90/epilogue.cuh"
#include "conv/patches/sm90/multiply.cuh"
#include "core/launch.h"
#include "device/barriers.cuh"
#include "device/copies.cuh"
#include "gemm/stage.cuh"

namespace cutfuse::conv::patches::sm90 {

using Barrier = cutlass::arch::ClusterTransactionBarrier;

/// Offsets in shared memory, in bytes.
template <int kN, int kPlanes>
struct Shared {
  int32_t patches, table, slots, control, total;

  CUTLASS_HOST_DEVICE explicit Shared(const Geometry& g) {
    patches = g.slabs() * slab_bytes(kN, kPlanes);  // weights come first
    table = patches + kGroups * g.patch_bytes();
    slots = table + g.tables() * g.table_bytes();
    control = slots + gemm::kSlots<PatchCoordinates<kN>> * kN * 4;
    total = control + 8 * (kGroups + 1) + 32 * kGroups;
  }
};

/// How far from where a pixel's filter begins the value of each term is: of 16 terms, those of each
/// of four lanes follow each other.
CUTLASS_DEVICE void write_table(const Geometry& g, const Part& part, uint16_t* table) {
  for (int32_t term = threadIdx.x; term < g.slabs() * kSlab; term += blockDim.x) {
    const int32_t known = min(term, g.terms - 1);  // weights of others are zeros
    const int32_t channel = known / g.taps();
    const int32_t tap = known - channel * g.taps();
    const int32_t r = tap / g.kernel_w, s = tap - r * g.kernel_w;
    const int32_t row = channel * part.box_h + r * g.dilation_h;
    const int32_t values = row * part.box_w + s * g.dilation_w;
    table[term / 16 * 16 + term % 4 * 4 + term % 16 / 4] = static_cast<uint16_t>(4 * values);
  }
}

/// By a warpgroup, with a word of shared memory for each of its warps.
CUTLASS_DEVICE uint32_t largest_of_all(uint32_t largest, int group, uint32_t* words) {
  const uint32_t of_warp = __reduce_max_sync(0xffffffffu, largest);
  if (threadIdx.x % 32 == 0) words[threadIdx.x % 128 / 32] = of_warp;
  sync_threads(1 + group, 128);
  return max(max(words[0], words[1]), max(words[2], words[3]));
}

/// Bits of the largest finite magnitude of `count` values.
CUTLASS_DEVICE uint32_t largest_finite(const char* values, int32_t count, int group,
                                       uint32_t* words) {
  const auto* each = reinterpret_cast<const float*>(values);
  float largest = 0.f;
  for (int32_t i = threadIdx.x % 128; i < count; i += 128) {
    const float magnitude = fabsf(each[i]);
    if (magnitude < INFINITY) largest = fmaxf(largest, magnitude);
  }
  return largest_of_all(__float_as_uint(largest), group, words);
}

/// A warpgroup's walk over its tiles.
template <int kN, int kPlanes>
class Walk {
  static constexpr uint32_t kInfinity = 0x7c00;  // as fp16

 public:
  CUTLASS_DEVICE Walk(const Params& p, const Shared<kN, kPlanes>& at, char* shared)
      : p_(p), group_(__shfl_sync(0xffffffffu, threadIdx.x / 128, 0)) {
    patch_ = shared + at.patches + group_ * p.g.patch_bytes();
    full_ = reinterpret_cast<uint64_t*>(shared + at.control) + group_;
    words_ = reinterpret_cast<uint32_t*>(shared + at.control + 8 * (kGroups + 1)) + 8 * group_;
    // So that the last round's tiles are spread over all blocks.
    tile_ = p.g.position(group_ * int32_t(gridDim.x) + int32_t(blockIdx.x));
  }

  /// Begins to bring the patch of the next tile.
  CUTLASS_DEVICE void load() const {
    const Geometry& g = p_.g;
    if (tile_.image >= g.batch) return;
    const Place at = place(tile_.tile);
    const int32_t left = at.column * g.stride_w - g.pad_w - g.early;
    const int32_t top = at.row * g.stride_h - g.pad_h;
    const Part& part = g.parts[at.part];
    if (g.copied) {
      copy(part, left, top);
    } else if (threadIdx.x % 128 == 0) {
      Barrier::arrive_and_expect_tx(full_, g.patch_values(part) * 4);
      cute::SM90_TMA_LOAD_5D::copy(&p_.maps[at.part], full_,
                                   static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                   patch_, left, top, 0, tile_.image, 0);
    }
  }

  CUTLASS_DEVICE void run(uint32_t weights, uint32_t table, uint32_t slots, bool columns_plain) {
    const Geometry& g = p_.g;
    const int lane = threadIdx.x % 32;
    const int row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    PatchCoordinates<kN> at;
    at.column0 = lane % 4 * 2;
    at.columns = g.out_channels;
    at.staged = slots + lane % 4 * 8;
    at.out_pixels = g.out_pixels();
    if constexpr (kPlanes == 2) begin_apart();
    for (uint32_t phase = 0; tile_.image < g.batch; phase ^= 1) {
      float sum[kN / 2];
      Barrier::wait(full_, phase);
      const Pixels pixels = pixels_of(row, table);
      __syncwarp();  // so that the compiler knows the warp to be whole: descriptors are uniform
      Multiplier<kN, kPlanes> multiplier(pixels, power_of_two(-exponent_), weights, g.terms);
      // Of short sums, the truncation of single instructions shows.
      if constexpr (kPlanes == 1) {
        multiplier.template run<64>(1.f, sum);
      } else if (g.terms < kShort) {
        multiplier.template run<16>(1.f, sum);
      } else if (g.terms < kMiddling || !g.many_tiles()) {
        multiplier.template run<32>(p_.promotion, sum);
      } else {
        multiplier.template run<64>(p_.promotion, sum);
      }
      // All have read the patch then. Words are taken in turn: none is written while it is read.
      uint32_t largest = largest_of_all(multiplier.largest(), group_, words_ + 4 * phase);
      if (!fits(largest)) largest = multiply_again(pixels, weights, phase, largest, sum);
      const Position tile = tile_;
      go_on();
      load();
      at.image = tile.image;
      const Place begin = place(tile.tile);
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) at.inside[r] = find(begin, row + 8 * r, &at.pixel[r]);
      finish<kN>(p_, columns_plain && largest < kInfinity, -exponent_, sum, at);
    }
  }

 private:
  /// Where a tile begins in the output.
  struct Place {
    int32_t part, row, column;
  };

  CUTLASS_DEVICE int32_t part_of(int32_t tile) const { return tile >= p_.g.parts[1].first ? 1 : 0; }

  CUTLASS_DEVICE Place place(int32_t tile) const {
    const int32_t number = part_of(tile);
    const Part& part = p_.g.parts[number];
    const int32_t of_part = tile - part.first, line = part.line.divide(of_part);
    return {number, line * part.block_h(),
            part.column + (of_part - line * part.blocks_w) * part.block_w()};
  }

  /// Of this thread, in the patch of the tile.
  CUTLASS_DEVICE Pixels pixels_of(int row, uint32_t table) const {
    const Geometry& g = p_.g;
    const int32_t number = part_of(tile_.tile);
    const Part& part = g.parts[number];
    const int32_t down = row >> part.block_w_log, right = row & (part.block_w() - 1);
    const int32_t line = g.stride_h * part.box_w;
    Pixels pixels;
    pixels.table = table + number * g.table_bytes() + threadIdx.x % 4 * 8;
    pixels.first = shared_address(patch_) + 4 * (down * line + right * g.stride_w + g.early);
    const uint32_t further = 4 * (part.block_w() > 8 ? 8 * g.stride_w : line);
    // A load's uniform offset: no addition.
    pixels.second = __shfl_sync(0xffffffffu, further, 0);
    asm volatile("" : "+r"(pixels.first));  // else it is computed again for every chunk
    return pixels;
  }

  /// Measures the patch and multiplies it with a scale that suits it. Returns the largest
  /// magnitude, which was `largest`.
  CUTLASS_DEVICE uint32_t multiply_again(const Pixels& pixels, uint32_t weights, uint32_t phase,
                                         uint32_t largest, float (&sum)[kN / 2]) {
    const Geometry& g = p_.g;
    const int32_t values = g.patch_values(g.parts[part_of(tile_.tile)]);
    const uint32_t bits = largest_finite(patch_, values, group_, words_ + 4 * (phase ^ 1));
    if (__all_sync(0xffffffffu, bits == 0) != 0) return largest;  // of zeros any scale suits
    // 2^-exponent, normal as its inverse is, puts it in [2^13, 2^14).
    exponent_ = static_cast<int>(max(bits >> 23, 14u)) - 140;
    Multiplier<kN, kPlanes> multiplier(pixels, power_of_two(-exponent_), weights, g.terms);
    multiplier.template run<kPlanes == 2 ? 16 : 64>(1.f, sum);
    return largest_of_all(multiplier.largest(), group_, words_ + 4 * phase);
  }

  /// Whether a largest magnitude is below infinity and above what keeps small values apart from
  /// zero.
  CUTLASS_DEVICE bool fits(uint32_t largest) const {
    constexpr uint32_t kLowest = kPlanes == 2 ? 0x5c00 : 0x4c00;  // 256, 16
    return largest < kInfinity && (largest >= kLowest || exponent_ == -126);
  }

  /// Warpgroups that begin together stay in step, and multiply and store at the same times: of many
  /// tiles that is 2 % slower (founding conv2d at ieee; H200).
  CUTLASS_DEVICE void begin_apart() const {
    constexpr int64_t kCycles = 4000;
    if (!p_.g.many_tiles()) return;
    const int64_t until = clock64() + kCycles * group_;
    while (clock64() < until) {
    }
  }

  /// Row by row, a warp each.
  CUTLASS_DEVICE void copy(const Part& part, int32_t left, int32_t top) const {
    const Geometry& g = p_.g;
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const auto* x = static_cast<const float*>(p_.epilogue.a.data);
    const int64_t plane = int64_t(g.height) * g.width;
    const float* image = x + int64_t(tile_.image) * g.channels * plane + left;
    for (int32_t channel = 0, y = warp; channel < g.channels; image += plane, ++channel) {
      for (; y < part.box_h; y += 4) {
        const bool inside = top + y >= 0 && top + y < g.height;
        const float* line = image + int64_t(top + y) * g.width;
        char* to = patch_ + (channel * part.box_h + y) * part.box_w * 4;
        for (int32_t i = lane; i < part.box_w; i += 32) {
          const bool exists = inside && left + i >= 0 && left + i < g.width;
          copy_async<4>(to + 4 * i, exists ? line + i : x, exists ? 4 : 0);
        }
      }
      y -= part.box_h;
    }
    cutlass::arch::cpasync_barrier_arrive_noinc(full_);
  }

  CUTLASS_DEVICE void go_on() {
    const Geometry& g = p_.g;
    tile_.tile += g.step.tile;
    tile_.image += g.step.image;
    if (tile_.tile >= g.tiles_of_image()) {
      tile_.tile -= g.tiles_of_image();
      ++tile_.image;
    }
  }

  /// Pixel `row` of a tile, in its plane; where there is none, one that exists.
  CUTLASS_DEVICE bool find(const Place& begin, int row, int32_t* pixel) const {
    const Geometry& g = p_.g;
    const Part& part = g.parts[begin.part];
    const int32_t p = begin.row + (row >> part.block_w_log);
    const int32_t q = begin.column + (row & (part.block_w() - 1));
    *pixel = min(p, g.out_height - 1) * g.out_width + min(q, g.out_width - 1);
    return p < g.out_height && q < g.out_width;
  }

  const Params& p_;
  int group_;
  char* patch_;
  uint64_t* full_;
  uint32_t* words_;
  Position tile_;
  int exponent_ = kPlanes == 2 ? -10 : -7;  // at first, of largest ones from 0.25, 0.125 on
};

template <int kN, int kPlanes>
__global__ void __launch_bounds__(kGroups * 128, 1)
    patch_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) char shared[];
  const Geometry& g = params.g;
  const Shared<kN, kPlanes> at(g);
  auto* barriers = reinterpret_cast<uint64_t*>(shared + at.control);
  uint64_t* packed = barriers + kGroups;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kGroups; ++i) Barrier::init(barriers + i, g.copied ? 128 : 1);
    Barrier::init(packed, 1);
    cutlass::arch::fence_barrier_init();
  }
  for (int i = 0; i < g.tables(); ++i) {
    char* table = shared + at.table + i * g.table_bytes();
    write_table(g, g.parts[i], reinterpret_cast<uint16_t*>(table));
  }
  cutlass::arch::fence_view_async_shared();
  __syncthreads();
  if (!params.x_is_complete) wait_for_previous_kernels();
  Walk<kN, kPlanes> walk(params, at, shared);
  walk.load();
  if (params.x_is_complete) wait_for_previous_kernels();
  if (threadIdx.x == 0) {
    constexpr int kBytes = slab_bytes(kN, kPlanes);
    const int count = g.slabs();
    Barrier::arrive_and_expect_tx(packed, count * kBytes);
    // Blocks begin with different ones: they do not ask L2 for the same at the same time.
    for (int k = 0, i = int(blockIdx.x) % count; k < count; ++k, i = i + 1 == count ? 0 : i + 1) {
      cute::SM90_BULK_COPY_G2S::copy(static_cast<const char*>(params.packed) + i * kBytes, packed,
                                     shared + i * kBytes, kBytes);
    }
  }
  auto* slots = reinterpret_cast<int32_t*>(shared + at.slots);
  const bool plain = gemm::stage_columns<PatchCoordinates<kN>, kN, kGroups * 128>(
      params.epilogue, 0, g.out_channels, true, int(threadIdx.x), slots,
      [](bool mine) { return __syncthreads_and(mine) != 0; });
  Barrier::wait(packed, 0);
  walk.run(shared_address(shared), shared_address(shared + at.table), shared_address(slots), plain);
}

template <int kN, int kPlanes>
int64_t shared_bytes(const Geometry& g) {
  return Shared<kN, kPlanes>(g).total;
}

template <int kN, int kPlanes>
Status launch_patches(const Params& params, const DeviceProps& device, void* stream) noexcept {
  auto* kernel = &patch_kernel<kN, kPlanes>;
  // The limit is the function's, which other threads launch with more or less.
  CUTFUSE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(device.shared_bytes)));
  return launch(kernel, dim3(static_cast<unsigned>(params.g.blocks)), dim3(kGroups * 128),
                static_cast<size_t>(shared_bytes<kN, kPlanes>(params.g)), stream, params);
}

template <int kN, int kPlanes>
Instance make_instance() {
  return {kN, kPlanes, &shared_bytes<kN, kPlanes>, &launch_patches<kN, kPlanes>};
}

}  // namespace cutfuse::conv::patches::sm90
