/// \file
#include "conv/problem.h"

#include <array>
#include <cstdio>

#include "core/checked_math.h"
#include "core/status.h"

namespace cutfuse {
namespace conv {
namespace {

long long print(int64_t value) { return static_cast<long long>(value); }

struct Named {
  const char* name;
  int64_t value;
  int64_t least;
};

std::array<Named, 16> sizes_of(const ConvProblem& p) noexcept {
  return {{
      {"batch", p.batch, 0},
      {"channels", p.channels, 0},
      {"height", p.height, 0},
      {"width", p.width, 0},
      {"out_channels", p.out_channels, 0},
      {"out_height", p.out_height, 0},
      {"out_width", p.out_width, 0},
      {"kernel_h", p.kernel_h, 1},
      {"kernel_w", p.kernel_w, 1},
      {"stride_h", p.stride_h, 1},
      {"stride_w", p.stride_w, 1},
      {"pad_h", p.pad_h, 0},
      {"pad_w", p.pad_w, 0},
      {"dilation_h", p.dilation_h, 1},
      {"dilation_w", p.dilation_w, 1},
      {"groups", p.groups, 1},
  }};
}

Status check_sizes(const ConvProblem& p) noexcept {
  for (const Named& size : sizes_of(p)) {
    CUTFUSE_CHECK(size.value >= size.least, Code::kInvalidValue,
                  "%s is %lld; it must be at least %lld", size.name, print(size.value),
                  print(size.least));
  }
  return {};
}

/// kNotSupported where products of two numbers would not fit 64 bits, or one of them 32.
Status check_limits(const ConvProblem& p) noexcept {
  constexpr int64_t kLimit = int64_t(1) << 30;
  for (const Named& size : sizes_of(p)) {
    CUTFUSE_CHECK(size.value < kLimit, Code::kNotSupported,
                  "%s is %lld; kernels take less than 2^30, and more is PyTorch's", size.name,
                  print(size.value));
  }
  int64_t made = 0;
  const bool fits =
      checked_multiply(p.stride_h * p.stride_w, p.out_channels, &made) && made < kLimit;
  CUTFUSE_CHECK(!p.transposed || fits, Code::kNotSupported,
                "%lld channels of a transposed convolution of stride %lldx%lld; kernels make less "
                "than 2^30 with their phases, and more is PyTorch's",
                print(p.out_channels), print(p.stride_h), print(p.stride_w));
  return {};
}

}  // namespace

Status validate(const ConvProblem& p) noexcept {
  if (Status status = check_sizes(p); !status.ok()) return status;
  const GemmProblem kind{0, 0, 0, p.precision, p.dtype};
  if (Status status = cutfuse::validate(kind); !status.ok()) return status;
  CUTFUSE_CHECK(p.channels % p.groups == 0 && p.out_channels % p.groups == 0, Code::kInvalidShape,
                "groups is %lld; it must divide channels %lld and out_channels %lld",
                print(p.groups), print(p.channels), print(p.out_channels));
  for (const auto& [a, b, c, d] : {
           std::array{p.batch, p.channels, p.height, p.width},
           std::array{p.batch, p.out_channels, p.out_height, p.out_width},
           std::array{p.out_channels, p.channels / p.groups, p.kernel_h, p.kernel_w},
       }) {
    int64_t product = 0;
    CUTFUSE_CHECK(checked_multiply(a, b, &product) && checked_multiply(product, c, &product) &&
                      checked_multiply(product, d, &product) && product < (int64_t(1) << 60),
                  Code::kInvalidShape,
                  "a tensor of %lld x %lld x %lld x %lld has too many elements", print(a), print(b),
                  print(c), print(d));
  }
  return {};
}

Status check_problem(const FusedConvProblem& problem, const DeviceProps& device) noexcept {
  if (Status status = validate(problem.conv); !status.ok()) return status;
  if (Status status = check_limits(problem.conv); !status.ok()) return status;
  if (Status status = validate(problem.program, kMaxSteps); !status.ok()) return status;
  if (Status status = validate(problem.after, kMaxSteps); !status.ok()) return status;
  const bool tail = problem.tail == Tail::kBatchNormTrain || problem.tail == Tail::kBatchNormEval;
  CUTFUSE_CHECK(tail || problem.tail == Tail::kNone, Code::kNotSupported,
                "a convolution's tail is batch_norm or nothing");
  CUTFUSE_CHECK(tail || problem.after.count == 0, Code::kInvalidValue,
                "a program after no tail belongs to the first program");
  const ConvProblem& p = problem.conv;
  const double values = double(p.batch) * p.out_height * p.out_width;
  CUTFUSE_CHECK(problem.tail != Tail::kBatchNormTrain || values > 1.0, Code::kInvalidValue,
                "Expected more than 1 value per channel when training, got %.0f", values);
  return check_device(device);
}

Status check_sums(const FusedConvProblem& problem, const DeviceProps& device) noexcept {
  CUTFUSE_CHECK(device.major == 9, Code::kNotSupported,
                "convolutions have kernels for compute capability 9.0 only, not %d.%d",
                device.major, device.minor);
  const ConvProblem& p = problem.conv;
  if (p.transposed && (p.stride_h > 1 || p.stride_w > 1)) {
    const bool spreads = (p.stride_h > 1 && p.dilation_h > 1 && p.kernel_h > 1) ||
                         (p.stride_w > 1 && p.dilation_w > 1 && p.kernel_w > 1);
    CUTFUSE_CHECK(!spreads && problem.tail == Tail::kNone, Code::kNotSupported,
                  "a transposed convolution of stride %lldx%lld has a kernel without dilation and "
                  "batch norm only",
                  print(p.stride_h), print(p.stride_w));
  }
  CUTFUSE_CHECK(p.channels > 0, Code::kNotSupported, "a sum over no channels is PyTorch's");
  // Beyond, single roundings of the promoted sums show (2.4e-7 at 6272, limit 2^-22); below, that
  // two planes hold 22 bits does (3.8e-7 of a lognormal value at 9, PyTorch 2.6e-7; 2.8e-7 of
  // positive ones at 16 of a phase).
  const shift::Interleave made = interleave_of(p);
  const int64_t min_terms = made.phases() == 1 ? 16 : 32;
  constexpr int64_t kMaxTerms = 4608;
  const ConvProblem taps = as_convolution(p);
  const int64_t fewest = p.channels / p.groups * made.fewest_taps();
  const int64_t most = p.channels / p.groups * taps.kernel_h * taps.kernel_w;
  CUTFUSE_CHECK(p.precision != Precision::kIeee || p.dtype != DType::kFloat32 ||
                    (fewest >= min_terms && most <= kMaxTerms),
                Code::kNotSupported,
                "sums of %lld terms at ieee are PyTorch's; the promise holds for %lld to %lld",
                print(fewest < min_terms ? fewest : most), print(min_terms), print(kMaxTerms));
  return {};
}

ConvProblem as_convolution(const ConvProblem& problem) noexcept {
  ConvProblem p = problem;
  if (!p.transposed) return p;
  p.transposed = false;
  p.out_channels *= p.stride_h * p.stride_w;
  // Pixel o is of phase (o + pad) % stride; it takes every stride-th tap.
  const auto turn = [](int64_t* kernel, int64_t* stride, int64_t* pad, int64_t dilation,
                       int64_t* out) {
    const int64_t skipped = *pad / *stride;
    *out = (*out - 1 + *pad) / *stride - skipped + 1;
    *kernel = shift::ceil_div(*kernel, *stride);
    *pad = dilation * (*kernel - 1) - skipped;
    *stride = 1;
  };
  turn(&p.kernel_h, &p.stride_h, &p.pad_h, p.dilation_h, &p.out_height);
  turn(&p.kernel_w, &p.stride_w, &p.pad_w, p.dilation_w, &p.out_width);
  return p;
}

shift::Interleave interleave_of(const ConvProblem& p) noexcept {
  const auto narrow = [](int64_t value) { return static_cast<int32_t>(value); };
  shift::Interleave made;
  if (p.transposed) {
    made.up_h = narrow(p.stride_h);
    made.up_w = narrow(p.stride_w);
    made.crop_h = narrow(p.pad_h % p.stride_h);
    made.crop_w = narrow(p.pad_w % p.stride_w);
  }
  made.height = narrow(p.out_height);
  made.width = narrow(p.out_width);
  made.kernel_h = narrow(p.kernel_h);
  made.kernel_w = narrow(p.kernel_w);
  return made;
}

shift::WeightView view_weight(const ConvProblem& p, const ConstTensor4& weight) noexcept {
  const auto [n, c, h, w] = weight.strides;
  shift::WeightView view;
  if (!p.transposed) {
    view = {weight.data, p.out_channels / p.groups * n, n, c, h, w, 0, 0};
  } else {
    const ConvProblem taps = as_convolution(p);
    const int64_t last =
        p.stride_h * (taps.kernel_h - 1) * h + p.stride_w * (taps.kernel_w - 1) * w;
    const char* data = static_cast<const char*>(weight.data) + last * size_of(p.dtype);
    view = {data, p.channels / p.groups * n, c, n, -p.stride_h * h, -p.stride_w * w, h, w};
  }
  return view;
}

}  // namespace conv

std::string to_string(const ConvProblem& p) {
  char text[256];
  std::snprintf(text, sizeof(text),
                "%s %lldx%lldx%lldx%lld -> %lldx%lldx%lld, filter %lldx%lld, stride %lldx%lld, "
                "padding %lldx%lld, dilation %lldx%lld, groups %lld",
                p.transposed ? "transposed convolution" : "convolution", conv::print(p.batch),
                conv::print(p.channels), conv::print(p.height), conv::print(p.width),
                conv::print(p.out_channels), conv::print(p.out_height), conv::print(p.out_width),
                conv::print(p.kernel_h), conv::print(p.kernel_w), conv::print(p.stride_h),
                conv::print(p.stride_w), conv::print(p.pad_h), conv::print(p.pad_w),
                conv::print(p.dilation_h), conv::print(p.dilation_w), conv::print(p.groups));
  return text;
}

}  // namespace cutfuse
