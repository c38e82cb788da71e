/// \file
#include "conv/patches/layout.h"

#include <algorithm>
#include <cmath>

#include "conv/problem.h"
#include "core/status.h"

namespace cutfuse::conv::patches {
namespace {

using shift::ceil_div;

constexpr int32_t kMostInBox = 256;
constexpr int32_t kNarrowest = 3, kWidest = 6;  // of blocks, as logarithms

/// Of the convolution alone.
Geometry as_geometry(const ConvProblem& p) {
  const auto narrow = [](int64_t value) { return static_cast<int32_t>(value); };
  Geometry g = {};
  g.batch = narrow(p.batch);
  g.channels = narrow(p.channels);
  g.height = narrow(p.height);
  g.width = narrow(p.width);
  g.out_channels = narrow(p.out_channels);
  g.out_height = narrow(p.out_height);
  g.out_width = narrow(p.out_width);
  g.kernel_h = narrow(p.kernel_h);
  g.kernel_w = narrow(p.kernel_w);
  g.stride_h = narrow(p.stride_h);
  g.stride_w = narrow(p.stride_w);
  g.pad_h = narrow(p.pad_h);
  g.pad_w = narrow(p.pad_w);
  g.dilation_h = narrow(p.dilation_h);
  g.dilation_w = narrow(p.dilation_w);
  g.terms = narrow(p.channels * p.kernel_h * p.kernel_w);
  return g;
}

/// Cuts `columns` from part.column on into blocks 2^block_w_log pixels wide; false if their patches
/// can be no boxes.
bool cut(const Geometry& g, int32_t columns, int32_t block_w_log, Part* part) {
  part->block_w_log = block_w_log;
  part->blocks_w = static_cast<int32_t>(ceil_div(columns, part->block_w()));
  part->blocks_h = static_cast<int32_t>(ceil_div(g.out_height, part->block_h()));
  part->line = shift::Divisor(part->blocks_w);
  const int64_t wide = int64_t(part->block_w() - 1) * g.stride_w +
                       int64_t(g.kernel_w - 1) * g.dilation_w + 1 + g.early;
  const int64_t high =
      int64_t(part->block_h() - 1) * g.stride_h + int64_t(g.kernel_h - 1) * g.dilation_h + 1;
  if (wide > kMostInBox || high > kMostInBox || g.channels > kMostInBox) return false;
  part->box_w = static_cast<int32_t>(ceil_div(wide, 4) * 4);
  part->box_h = static_cast<int32_t>(high);
  // As far as two bytes of the table count.
  return int64_t(part->box_w) * 4 * high * g.channels < 1 << 16;
}

/// Cuts the output into blocks 2^wide_log pixels wide, and the columns that remain, if narrow_log
/// is not 0, into narrower ones.
bool cut(int32_t wide_log, int32_t narrow_log, const DeviceProps& device, Geometry* g) {
  const int32_t rest = narrow_log == 0 ? 0 : g->out_width % (1 << wide_log);
  const int32_t columns = g->out_width - rest;
  if (columns == 0 || (narrow_log != 0 && rest == 0)) return false;
  // The copy engine's strides are multiples of 16 bytes, and a box begins at one.
  g->copied = g->width % 4 != 0;
  g->early = g->copied ? 0 : (4 - g->pad_w % 4) % 4;
  if (!cut(*g, columns, wide_log, &g->parts[0])) return false;
  Part& second = g->parts[1];
  second.column = columns;
  second.first = g->parts[0].tiles();
  if (rest > 0 && !cut(*g, rest, narrow_log, &second)) return false;
  const int64_t tiles = int64_t(g->batch) * g->tiles_of_image();
  if (tiles >= 1 << 30) return false;
  g->tiles = static_cast<int32_t>(tiles);
  g->blocks = std::min(device.sm_count, static_cast<int32_t>(ceil_div(tiles, kGroups)));
  g->step = g->position(g->blocks * kGroups);
  return true;
}

/// What tiles cost, those of larger patches and shorter runs of results more.
double cost(const Geometry& g) {
  double sum = 0.0;
  for (const Part& part : g.parts) {
    sum += part.tiles() * (1.0 + g.patch_values(part) / 1e5 + 4.0 / part.block_w());
  }
  return g.batch * sum;
}

Status check(const FusedConvProblem& problem, const DeviceProps& device) {
  const ConvProblem& p = problem.conv;
  if (Status status = check_sums(problem, device); !status.ok()) return status;
  const bool plain = p.groups == 1 && (!p.transposed || (p.stride_h == 1 && p.stride_w == 1));
  CUTFUSE_CHECK(plain && p.dtype == DType::kFloat32 && !problem.channels_last &&
                    problem.pixel_stride == 1 && problem.tail != Tail::kBatchNormTrain &&
                    device.minor == 0,
                Code::kNotSupported,
                "%s: patches are of contiguous fp32 NCHW, in one group, without statistics",
                to_string(p).c_str());
  // Of fewer at ieee, single truncations show.
  constexpr int64_t kFewest = 48;
  CUTFUSE_CHECK(p.precision == Precision::kTf32 || p.channels * p.kernel_h * p.kernel_w >= kFewest,
                Code::kNotSupported, "%s: patches at ieee are of sums of at least %lld terms",
                to_string(p).c_str(), static_cast<long long>(kFewest));
  CUTFUSE_CHECK(double(p.batch) * double(p.out_height) * double(p.out_width) < 0x1p30,
                Code::kNotSupported, "%s: patches are of fewer than 2^30 pixels",
                to_string(p).c_str());
  return {};
}

}  // namespace

Status lay_out(const FusedConvProblem& problem, const DeviceProps& device, const ConvPolicy* policy,
               const Instance** instance, Geometry* geometry) {
  if (Status status = check(problem, device); !status.ok()) return status;
  const Geometry whole = as_geometry(as_convolution(problem.conv));
  const int32_t planes = problem.conv.precision == Precision::kIeee ? 2 : 1;
  CUTFUSE_CHECK(policy == nullptr || policy->planes == planes, Code::kNotSupported,
                "%s has not the planes of %s", to_string(*policy).c_str(),
                to_string(problem.conv).c_str());
  int32_t count = 0;
  const Instance* all = instances(&count);
  *instance = nullptr;
  for (const Instance* one = all; one != all + count; ++one) {
    const bool fits = whole.out_channels <= one->columns && one->planes == planes &&
                      (policy == nullptr || policy->patch_n == one->columns);
    if (fits && (*instance == nullptr || one->columns < (*instance)->columns)) *instance = one;
  }
  CUTFUSE_CHECK(*instance != nullptr, Code::kNotSupported,
                "%s: no such patch kernel has so many output channels",
                to_string(problem.conv).c_str());
  double least = INFINITY;
  const auto consider = [&](int32_t wide_log, int32_t narrow_log) {
    Geometry g = whole;
    if (!cut(wide_log, narrow_log, device, &g)) return;
    if ((*instance)->shared_bytes(g) > device.shared_bytes || cost(g) >= least) return;
    least = cost(g);
    *geometry = g;
  };
  for (int32_t wide_log = kNarrowest; wide_log <= kWidest; ++wide_log) {
    consider(wide_log, 0);
    for (int32_t log = kNarrowest; log < wide_log; ++log) consider(wide_log, log);
  }
  CUTFUSE_CHECK(least < INFINITY, Code::kNotSupported,
                "%s: weights and patches do not fit into shared memory",
                to_string(problem.conv).c_str());
  return {};
}

/// Least squares over 137 launches of 85 problems, by graph replay from a cold L2 on an H100 and an
/// H200, median error 9 %; and 4 us, as what PyTorch takes is counted in conv/eager.cc.
double estimate(const FusedConvProblem& problem, const Instance& instance, const Geometry& g,
                const DeviceProps& device) noexcept {
  // Of a warpgroup's tile: of its results, of 32 terms multiplied together, and of its patch.
  const bool two = instance.planes == 2, short_sums = g.terms < kMiddling;
  const double columns = instance.columns;
  const double result = (two ? 0.032 : 0.023) + (g.out_width % 4 == 0 ? 0 : 0.0048);
  const double chunk = two ? (short_sums ? 0.0075 : 0.0067) : (short_sums ? 0.0057 : 0.0046);
  const double rows = double(g.channels) * g.parts[0].box_h;
  const double patch =
      g.copied ? 0.00058 * g.patch_values(g.parts[0]) + 0.02 * rows : 0.0065 * rows;
  const double tile = columns * (result + double(ceil_div(g.terms, 32)) * chunk) + patch;
  const auto waves = double(ceil_div(g.tiles, int64_t(kGroups) * device.sm_count));
  const double bytes =
      4.0 * g.batch *
      (double(g.channels) * g.height * g.width + double(g.out_channels) * g.out_pixels());
  const double launches = problem.packed_weight ? 7.0 : 10.0;
  // Results of an odd width leave in parts of sectors.
  return launches + std::max(waves * tile, bytes / (g.out_width % 2 == 0 ? 2.6e6 : 1.6e6));
}

}  // namespace cutfuse::conv::patches
