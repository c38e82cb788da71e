/// \file
#include "conv/eager.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace cutfuse::conv {
namespace {

// Fitted from below to 515 convolutions on an H200, random ones and those of ResNet-50 and
// MobileNet, by graph replay from a cold L2: cuDNN 9 as torch 2.11 asks for it. A tenth of them
// took less than this, one in twenty by more than a tenth, one 0.38 of it; the median took 1.5 of
// it. Then what follows them, and channels_last at tf32 of 48 channels and more, to ResNet-50's.

double ceil_div(double a, double b) { return std::ceil(a / b); }

/// A problem in the words of what follows: bytes of tensors, operations, channels of a group.
struct Work {
  const FusedConvProblem& problem;
  const ConvProblem& p;
  double out_bytes, bytes, flops, channels;
  bool narrow, last, unit_stride;

  explicit Work(const FusedConvProblem& given)
      : problem(given),
        p(given.conv),
        channels(double(p.channels) / double(p.groups)),
        narrow(p.dtype != DType::kFloat32),
        last(given.channels_last),
        unit_stride(p.stride_h == 1 && p.stride_w == 1) {
    const auto size = static_cast<double>(size_of(p.dtype));
    const double in = double(p.batch) * double(p.channels) * double(p.height) * double(p.width);
    const double out =
        double(p.batch) * double(p.out_channels) * double(p.out_height) * double(p.out_width);
    const double sums =
        p.transposed ? in * double(p.out_channels) / double(p.groups) : out * channels;
    out_bytes = out * size;
    bytes = in * size + out_bytes;
    flops = 2.0 * sums * double(p.kernel_h) * double(p.kernel_w);
  }
  bool ieee() const { return !narrow && p.precision == Precision::kIeee; }
  /// Whether both sides have channels in whole vectors of 16 bytes.
  bool aligned() const {
    const int64_t vector = 16 / size_of(p.dtype);
    return p.channels % vector == 0 && p.out_channels % vector == 0;
  }

  /// Terabytes and teraflops a second that follow each other at sharpness 1, as where layouts are
  /// converted, and hide each other the more the sharper.
  double at(double memory, double arithmetic, double sharpness) const {
    const double a = bytes / (memory * 1e6), b = flops / (arithmetic * 1e6);
    return 6.0 + std::pow(std::pow(a, sharpness) + std::pow(b, sharpness), 1.0 / sharpness);
  }
};

double of_groups(const Work& w) {
  if (w.channels >= 8.0) return w.at(0.9, 104.0, 1.0) * (w.p.transposed ? 2.0 : 1.0);
  if (w.p.transposed) {
    const double slow = w.narrow || w.last ? 2.0 : 0.5;
    return w.at(3.1, w.unit_stride ? 12.0 : slow, 1.0);
  }
  if (!w.last) return w.at(3.0, 3.0, 1.0);
  return w.narrow ? w.at(2.06, 10.0, 3.0) : w.at(4.0, 6.0, 3.0);
}

double of_transposed(const Work& w) {
  // Of whole vectors of channels there are the two founding layouts alone: 1.3 and 0.64 ms.
  if (w.aligned() && w.unit_stride && !w.ieee()) {
    if (w.narrow) return w.last ? w.at(2.6, 360.0, 3.0) : w.at(0.62, 360.0, 1.0);
    return w.last ? w.at(2.0, 200.0, 3.0) : w.at(1.2, 200.0, 1.0);
  }
  const double rate = w.channels < 12.0 || w.ieee() ? 45.0 : w.narrow ? 360.0 : 62.0;
  const bool dilated =
      std::max(w.p.dilation_h, w.p.dilation_w) > 1 && std::max(w.p.kernel_h, w.p.kernel_w) > 1;
  return w.at(w.last ? 0.9 : 0.62, rate, w.last ? 3.0 : 1.0) *
         (dilated && w.unit_stride ? 1.5 : 1.0);
}

double of_narrow(const Work& w) {
  const double c = w.channels;
  const double time = w.last ? (c < 12.0   ? w.at(0.24, 132.0, 3.0)
                                : c < 96.0 ? w.at(2.6, 240.0, 3.0)
                                           : w.at(3.8, 500.0, 3.0))
                             : (c < 12.0   ? w.at(0.35, 130.0, 1.0)
                                : c < 64.0 ? w.at(1.1, 430.0, 1.0)
                                           : w.at(4.0, 430.0, 1.0));
  return time * (c >= 12.0 && !w.aligned() ? 1.5 : 1.0);
}

/// A block of 128 x 128 results takes taps and 32 channels one after the other.
double in_sequence(const Work& w) {
  const ConvProblem& p = w.p;
  const bool fours = p.channels % 4 == 0;
  if (w.last && (fours || w.channels < 12.0)) return 0.0;
  const double pixels = double(p.batch) * double(p.out_height) * double(p.out_width);
  const double blocks = ceil_div(pixels, 128.0) * ceil_div(double(p.out_channels), 128.0);
  const double steps = double(p.kernel_h) * double(p.kernel_w) * ceil_div(w.channels, 32.0);
  const double step = w.ieee() && w.channels >= 12.0 && !fours ? 1.0
                      : p.out_channels < 48                    ? 0.12
                      : w.channels < 3.0                       ? 0.2
                      : fours                                  ? 0.3
                      : w.ieee()                               ? 0.4
                                                               : 0.45;
  return 6.0 + ceil_div(blocks, 132.0) * steps * step;
}

double of_floats(const Work& w) {
  const double c = w.channels;
  const double unaligned = c >= 64.0 && !w.aligned() ? (w.ieee() ? 1.4 : w.last ? 2.0 : 1.5) : 1.0;
  const double time = w.ieee()   ? (c < 12.0   ? w.at(0.89, 23.0, 1.0)
                                    : c < 48.0 ? w.at(1.8, 19.0, 1.0)
                                    : c < 64.0 ? w.at(1.8, 72.0, 1.0)
                                               : w.at(1.9, 85.0, 1.0))
                      : w.last   ? (c < 12.0   ? w.at(0.87, 62.0, 1.5)
                                    : c < 48.0 ? w.at(0.54, 148.0, 1.5)
                                               : w.at(5.2, 340.0, 3.0))
                      : c < 12.0 ? w.at(0.6, 80.0, 1.0)
                      : c < 24.0 ? w.at(0.57, 106.0, 1.0)
                      : c < 64.0 ? w.at(0.85, 195.0, 1.0)
                                 : w.at(12.0, 200.0, 1.0);
  return std::max(time * unaligned, in_sequence(w));
}

/// What follows, one pass after the other: torch.compile makes fewer of them, but PyTorch runs what
/// is handed over as it is.
double of_passes(const Work& w) {
  const FusedConvProblem& problem = w.problem;
  // The first step is usually a bias, which the convolution adds.
  const double steps = std::max(problem.program.count - 1, 0) + problem.after.count;
  const double step = 1.0 + std::max(1.5, 2.0 * w.out_bytes / 4.5e6);
  if (problem.tail == Tail::kNone) return steps * step;
  if (problem.tail == Tail::kBatchNormTrain) {
    const double bandwidth = w.out_bytes > 40e6 ? 3.6e6 : 6e6;  // small results stay in L2
    return 2.0 * (2.0 + 2.0 * w.out_bytes / bandwidth) + steps * step;
  }
  // In eval a block has one plane of NCHW; of channels_last two small kernels come before.
  const double planes = w.last ? 0.0 : 6e-4 * double(w.p.batch) * double(w.p.out_channels);
  const double before = w.last ? 5.0 : 2.0;
  return before + std::max(planes, 2.0 * w.out_bytes / 2.9e6) + steps * step;
}

}  // namespace

double estimate_eager(const FusedConvProblem& problem) noexcept {
  const Work w(problem);
  const double contraction = w.p.groups > 1   ? of_groups(w)
                             : w.p.transposed ? of_transposed(w)
                             : w.narrow       ? of_narrow(w)
                                              : of_floats(w);
  return contraction + of_passes(w);
}

}  // namespace cutfuse::conv
