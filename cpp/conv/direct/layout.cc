/// \file
#include "conv/direct/layout.h"

#include <algorithm>
#include <cmath>

#include "conv/problem.h"
#include "core/status.h"

namespace cutfuse::conv::direct {
namespace {

constexpr int64_t kLimit = int64_t(1) << 30;
constexpr int64_t kMostChannels = 7;
constexpr int32_t kMostItems = 4 * kThreads;

int32_t narrow(int64_t value) { return static_cast<int32_t>(value); }

/// The kernel whose filter is unrolled, or the one for any.
Direct kernel_of(const ConvProblem& p) {
  const bool square = p.kernel_h == p.kernel_w && p.stride_h == p.stride_w && p.dilation_h == 1 &&
                      p.dilation_w == 1 && p.stride_h <= (p.transposed ? 1 : 2);
  const bool sized = p.kernel_h == 3 || p.kernel_h == 5 || p.kernel_h == 7;
  return square && sized ? static_cast<Direct>(p.kernel_h) : Direct::kAny;
}

/// Sums without padding's products want the transposed convolution as it is; a window's patch wants
/// it turned round.
Axis axis_of(bool gathers, int64_t size, int64_t out, int64_t taps, int64_t stride, int64_t pad,
             int64_t dilation) {
  Axis axis;
  axis.size = narrow(size);
  axis.out_size = narrow(out);
  axis.taps = narrow(taps);
  axis.down = gathers ? 1 : narrow(stride);
  axis.origin = gathers ? narrow(pad) : -narrow(pad);
  axis.step = gathers ? -narrow(dilation) : narrow(dilation);
  if (gathers) axis.up = Divisor(narrow(stride));
  return axis;
}

Status check_sizes(const FusedConvProblem& problem) {
  const ConvProblem& p = problem.conv;
  const int64_t channels = p.channels / p.groups;
  CUTFUSE_CHECK(channels <= kMostChannels, Code::kNotSupported,
                "%lld channels of a group: a direct kernel takes fewer than 8",
                static_cast<long long>(channels));
  CUTFUSE_CHECK(channels > 0 && p.height > 0 && p.width > 0, Code::kNotSupported,
                "%s: a direct kernel has an image to read", to_string(p).c_str());
  CUTFUSE_CHECK(problem.tail != Tail::kBatchNormTrain, Code::kNotSupported,
                "a direct kernel has batch norm in eval only");
  // Each is below 2^30, so that products of two fit 64 bits, and what is checked sums that fit 32.
  const int64_t reach = std::max((p.kernel_h - 1) * p.dilation_h, (p.kernel_w - 1) * p.dilation_w);
  const bool strides = !p.transposed;
  const int64_t walks = std::max((p.out_height + 256) * (strides ? p.stride_h : 1) + p.pad_h,
                                 (p.out_width + 256) * (strides ? p.stride_w : 1) + p.pad_w);
  CUTFUSE_CHECK(std::max(reach, walks) < kLimit, Code::kNotSupported,
                "%s: a direct kernel takes less than 2^30 pixels in a row", to_string(p).c_str());
  return {};
}

/// A block's groups, output channels of each, and threads' pieces of a plane.
struct Shape {
  int32_t groups, features, row_groups, column_groups;
};

/// A power of two, at most a block's threads.
int32_t lanes_of(int32_t count) {
  int32_t lanes = 1;
  while (lanes < count && lanes < kThreads) lanes *= 2;
  return lanes;
}

/// How many blocks there are; 0 if they need too much shared memory.
double fill(const Params& p, const Shape& shape, Tile* t) {
  const int32_t taps = p.rows.taps, stride = p.rows.down, channels = p.channels.divisor;
  const int32_t rows = shape.row_groups * rows_at(stride);
  const int32_t columns = shape.column_groups * kColumns;
  const int32_t made = shape.groups * shape.features;
  const int32_t patch_rows = (rows - 1) * stride + taps;
  const int32_t patch_columns = (columns - 1) * stride + taps;
  const int64_t read = ceil_div((kColumns - 1) * stride + taps, 4) * 4;
  t->pitch = narrow(int64_t(columns - kColumns) * stride + read);
  const int64_t patch = p.channels_last ? int64_t(patch_rows) * patch_columns * kPixelChannels
                                        : int64_t(shape.groups) * channels * patch_rows * t->pitch;
  const int64_t weights = ceil_div(int64_t(made) * channels * taps * taps, 4) * 4;
  const int64_t results = p.channels_last ? 0 : int64_t(made) * rows * columns;
  const int64_t items = int64_t(made) * shape.row_groups * shape.column_groups;
  if ((patch + weights + results) * 4 > kSharedBytes || items > kMostItems) return 0.0;
  t->groups = Divisor(shape.groups);
  t->features = Divisor(shape.features);
  t->row_groups = Divisor(shape.row_groups);
  t->column_groups = Divisor(shape.column_groups);
  t->all_features = Divisor(made);
  t->rows = Divisor(rows);
  t->columns = columns;
  t->patch_rows = patch_rows;
  t->patch_columns = patch_columns;
  t->inside_rows = Divisor(std::min(patch_rows, p.rows.size));
  t->inside_columns = Divisor(std::min(patch_columns, p.columns.size));
  t->lanes = lanes_of(t->inside_columns.divisor);
  // Up to three more columns make fours.
  t->four_lanes = lanes_of(narrow(ceil_div(std::min(patch_columns + 3, p.columns.size), 4)));
  t->result_lanes = lanes_of(std::min(columns, p.columns.out_size));
  t->patch_floats = narrow(patch);
  t->weight_floats = narrow(weights);
  t->result_floats = narrow(results);
  t->items = narrow(items);
  t->group_tiles = Divisor(narrow(ceil_div(p.groups, shape.groups)));
  t->feature_tiles = Divisor(narrow(ceil_div(p.features, shape.features)));
  t->row_tiles = Divisor(narrow(ceil_div(p.rows.out_size, rows)));
  t->column_tiles = Divisor(narrow(ceil_div(p.columns.out_size, columns)));
  return double(p.batch) * t->group_tiles.divisor * t->feature_tiles.divisor *
         t->row_tiles.divisor * t->column_tiles.divisor;
}

/// Cycles of a block: 16 bytes of x in one, as memory is shared among 132 multiprocessors; a warp's
/// products and about 16 other instructions a result in a quarter. Not measured.
double cycles_of(const Params& p, const Tile& t) {
  const double kSize = double(rows_at(p.rows.down)) * kColumns;
  const double rounds = std::ceil(double(t.items) / kThreads);
  const double products = double(p.rows.taps) * p.columns.taps * p.channels.divisor;
  return 300.0 + 0.25 * t.patch_floats + 0.2 * t.weight_floats +
         rounds * kThreads * kSize * (products + 16.0) / 128.0;
}

int32_t next(int32_t parts) { return parts + (parts + 1) / 2; }

/// The tile of fewest cycles, where two blocks of a multiprocessor have work.
void choose_tile(const DeviceProps& device, Params* p) {
  const int32_t row_groups = narrow(ceil_div(p->rows.out_size, rows_at(p->rows.down)));
  const int32_t column_groups = narrow(ceil_div(p->columns.out_size, kColumns));
  int32_t most = std::min(p->groups, 64);
  if (p->channels_last) {
    most = std::min(p->groups, kPixelChannels / p->channels.divisor);
    if (most > 4) most -= most % 4;  // so that every block's channels begin at a multiple of four
  }
  double best = INFINITY;
  const auto each = [](int32_t all, int32_t limit, const auto& body) {
    for (int32_t parts = 1;; parts = next(parts)) {
      const auto part = narrow(ceil_div(all, parts));
      if (part <= limit) body(part);
      if (part == 1) break;
    }
  };
  each(column_groups, 64, [&](int32_t columns) {
    each(row_groups, 64, [&](int32_t rows) {
      each(p->features, 64, [&](int32_t features) {
        for (int32_t groups = most; groups > 0; groups = p->channels_last ? 0 : groups / 2) {
          Tile tile;
          const double blocks = fill(*p, {groups, features, rows, columns}, &tile);
          if (blocks == 0.0) continue;
          const double cost = std::max(blocks, 2.0 * device.sm_count) * cycles_of(*p, tile);
          if (cost >= best) continue;
          best = cost;
          p->tile = tile;
          p->blocks = static_cast<int64_t>(std::min(blocks, 0x1p40));
        }
      });
    });
  });
}

}  // namespace

Status lay_out(const FusedConvProblem& problem, const DeviceProps& device, Direct* kernel,
               Params* params) {
  if (Status status = check_sizes(problem); !status.ok()) return status;
  const Direct found = kernel_of(problem.conv);
  if (*kernel == Direct::kSelected) *kernel = found;
  CUTFUSE_CHECK(*kernel == found || *kernel == Direct::kAny, Code::kNotSupported,
                "%s: not of the filter and strides of direct kernel %d",
                to_string(problem.conv).c_str(), static_cast<int32_t>(*kernel));
  const bool any = *kernel == Direct::kAny;
  const ConvProblem p = any ? problem.conv : as_convolution(problem.conv);
  params->dtype = p.dtype;
  params->batch = narrow(p.batch);
  params->groups = narrow(p.groups);
  params->channels = Divisor(narrow(p.channels / p.groups));
  params->features = narrow(p.out_channels / p.groups);
  params->channels_last = problem.channels_last;
  params->rows =
      axis_of(p.transposed, p.height, p.out_height, p.kernel_h, p.stride_h, p.pad_h, p.dilation_h);
  params->columns =
      axis_of(p.transposed, p.width, p.out_width, p.kernel_w, p.stride_w, p.pad_w, p.dilation_w);
  if (any) {
    const double quarters = std::ceil(double(params->pixels()) / 4.0);
    const double units = double(p.batch) * p.out_channels * quarters;
    params->units = static_cast<int64_t>(std::min(units, 0x1p60));
    params->blocks = ceil_div(params->units, kThreads);
  } else {
    choose_tile(device, params);
  }
  CUTFUSE_CHECK(params->blocks < int64_t(1) << 31, Code::kNotSupported,
                "%s: a direct kernel takes fewer than 2^31 blocks; split the batch",
                to_string(problem.conv).c_str());
  return {};
}

Filters filters_of(const ConvProblem& p, Direct kernel, const ConstTensor4& weight) noexcept {
  const auto [n, c, h, w] = weight.strides;
  if (!p.transposed) return {weight.data, p.out_channels / p.groups * n, n, c, h, w};
  const int64_t group = p.channels / p.groups * n;
  if (kernel == Direct::kAny) return {weight.data, group, c, n, h, w};
  const int64_t last = (p.kernel_h - 1) * h + (p.kernel_w - 1) * w;
  return {static_cast<const char*>(weight.data) + last * size_of(p.dtype), group, c, n, -h, -w};
}

double estimate(const FusedConvProblem& problem, const DeviceProps& device,
                Direct kernel) noexcept {
  // Of 200 convolutions on an H200; of few products a block waits for little else than memory.
  const ConvProblem& p = problem.conv;
  const double in = double(p.batch) * double(p.channels) * double(p.height) * double(p.width);
  const double results =
      double(p.batch) * double(p.out_channels) * double(p.out_height) * double(p.out_width);
  const double bytes = (in + results) * double(size_of(p.dtype));
  const double channels = double(p.channels) / double(p.groups);
  const double products = channels * double(p.kernel_h) * double(p.kernel_w);
  const bool narrow = p.dtype != DType::kFloat32;
  const double peak = 128.0 * 1.5e3 * device.sm_count;  // products in a microsecond
  const double launches = problem.tail == Tail::kBatchNormEval ? 11.0 : 8.0;
  if (kernel == Direct::kAny) {
    const double work = results * (products + 12.0) / (0.02 * peak);
    return launches + std::max({bytes / 2e6, work, 0.6 * products});  // a thread's, one by one
  }
  // Few columns leave lanes idle.
  const bool ragged = p.out_width <= 16;
  const double waste = !ragged ? 1.0 : problem.channels_last ? 1.4 : 2.3;
  const double share = narrow || channels > 1.0 ? 0.22 : 0.5;
  return launches + waste * (bytes / 3.4e6 + results * (products + 16.0) / (share * peak));
}

}  // namespace cutfuse::conv::direct
