/// \file
#include "conv/eager.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace cutfuse::conv {
namespace {

// Of cuDNN 9 as torch 2.11 asks for it, by graph replay from a cold L2. Of fp32 of eight channels a
// group and more fitted to 2,600 timings of 700 random convolutions, a third of them with groups,
// in both layouts at both tiers, on an H100, whose memory is taken to be a fifth faster, as an
// H200's is: a quarter took up to 1.12 of this, a tenth up to 0.96, the median 1.5, a tenth 4.4 and
// more. The rest fitted from below to 515 on an H200, random ones and those of ResNet-50 and
// MobileNet; what follows them to ResNet-50's.

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

/// Terabytes and teraflops a second that follow each other, and microseconds before them.
struct Rate {
  double memory, arithmetic, start;
};

/// Of NCHW and of channels_last.
Rate either(const Work& w, Rate nchw, Rate last) { return w.last ? last : nchw; }

/// Of many images cuDNN may transform large filters, which take no longer than small ones then.
bool transforms(const Work& w) {
  const int64_t taps = w.p.kernel_h * w.p.kernel_w;
  return w.ieee() && w.p.groups == 1 && w.unit_stride && taps >= 49 && w.p.batch >= 32 &&
         w.channels >= 32.0;
}

Rate rate_at_ieee(const Work& w) {
  const double taps = double(w.p.kernel_h) * double(w.p.kernel_w);
  if (transforms(w)) return {5.0, 2.0 * taps, 14.0};
  if (w.p.groups > 1) {
    if (w.p.transposed) return either(w, {0.3, 24.0, 9.0}, {0.4, 21.0, 9.0});
    return either(w, {1.2, 24.0, 9.0}, {0.8, w.channels < 12.0 ? 13.0 : 29.0, 8.0});
  }
  if (w.p.transposed) {
    if (!w.unit_stride && w.channels < 48.0) return either(w, {0.8, 9.0, 18.0}, {0.7, 9.0, 20.0});
    if (!w.unit_stride) return either(w, {1.3, 33.0, 20.0}, {0.8, 33.0, 25.0});
    if (w.channels < 48.0) return either(w, {0.9, 34.0, 15.0}, {0.7, 34.0, 20.0});
    return either(w, {4.0, 34.0, 18.0}, {1.5, 34.0, 22.0});
  }
  if (w.channels < 12.0) return either(w, {2.5, 22.0, 12.0}, {1.3, 21.0, 13.0});
  if (w.channels < 48.0) {
    if (w.unit_stride) return either(w, {1.6, 35.0, 10.0}, {1.4, 33.0, 14.0});
    return either(w, {6.0, 23.0, 9.0}, {4.0, 21.0, 13.0});
  }
  if (taps == 1.0) return either(w, {7.0, 30.0, 12.0}, {8.0, 20.0, 12.0});
  if (!w.unit_stride) return either(w, {8.0, 25.0, 18.0}, {5.0, 24.0, 18.0});
  if (taps <= 9.0) return either(w, {5.0, 60.0, 14.0}, {4.0, 55.0, 20.0});
  return either(w, {5.0, 30.0, 16.0}, {4.0, 30.0, 25.0});
}

Rate rate_at_tf32(const Work& w) {
  const bool one_tap = w.p.kernel_h == 1 && w.p.kernel_w == 1, fours = w.aligned();
  if (w.p.groups > 1) {
    if (w.p.transposed) return either(w, {0.35, 225.0, 11.0}, {0.37, 260.0, 16.0});
    if (w.channels < 12.0) return either(w, {0.75, 50.0, 10.0}, {1.2, 85.0, 20.0});
    return either(w, {0.7, 150.0, 20.0}, {0.6, 190.0, 20.0});
  }
  if (w.p.transposed) {
    if (!w.unit_stride) return either(w, {0.7, 200.0, 20.0}, {1.3, 240.0, 13.0});
    if (w.channels >= 48.0) return either(w, {5.0, 140.0, 18.0}, {8.0, 270.0, 20.0});
    return fours ? either(w, {1.2, 200.0, 6.0}, {1.9, 400.0, 8.0})
                 : either(w, {0.8, 150.0, 15.0}, {1.4, 200.0, 14.0});
  }
  if (w.channels < 12.0) return either(w, {1.2, 46.0, 13.0}, {1.2, 70.0, 16.0});
  if (w.channels < 48.0) {
    if (w.unit_stride) {
      return fours ? either(w, {0.8, 226.0, 11.0}, {2.6, 185.0, 12.0})
                   : either(w, {0.62, 132.0, 13.0}, {1.0, 125.0, 12.0});
    }
    return fours ? either(w, {1.25, 200.0, 15.0}, {4.2, 176.0, 13.0})
                 : either(w, {1.1, 95.0, 18.0}, {0.7, 108.0, 11.0});
  }
  if (one_tap) {
    return fours ? either(w, {3.0, 158.0, 8.0}, {10.0, 120.0, 8.0})
                 : either(w, {8.0, 54.0, 14.0}, {8.0, 57.0, 20.0});
  }
  if (w.unit_stride) {
    return fours ? either(w, {1.1, 260.0, 14.0}, {3.5, 344.0, 10.0})
                 : either(w, {0.8, 191.0, 22.0}, {1.4, 185.0, 20.0});
  }
  return fours ? either(w, {1.5, 200.0, 17.0}, {9.0, 204.0, 12.0})
               : either(w, {1.4, 110.0, 22.0}, {1.8, 70.0, 15.0});
}

/// Of groups of fewer than eight channels, or of 16-bit tensors.
double of_groups(const Work& w) {
  if (w.channels >= 8.0) return w.at(0.9, 104.0, 1.0) * (w.p.transposed ? 2.0 : 1.0);
  if (w.p.transposed) {
    const double slow = w.narrow || w.last ? 2.0 : 0.5;
    return w.at(3.1, w.unit_stride ? 12.0 : slow, 1.0);
  }
  if (!w.last) return w.at(3.0, 3.0, 1.0);
  return w.narrow ? w.at(2.06, 10.0, 3.0) : w.at(4.0, 6.0, 3.0);
}

/// Of 16-bit tensors.
double of_transposed(const Work& w) {
  // Of whole vectors of channels there is the founding layout alone.
  if (w.aligned() && w.unit_stride) {
    return w.last ? w.at(2.6, 360.0, 3.0) : w.at(0.62, 360.0, 1.0);
  }
  const double rate = w.channels < 12.0 ? 45.0 : 360.0;
  return w.at(w.last ? 0.9 : 0.62, rate, w.last ? 3.0 : 1.0);
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
                      : w.channels < 2.0 && blocks <= 40.0     ? 0.1
                      : w.channels < 3.0                       ? 0.2
                      : fours                                  ? 0.3
                      : w.ieee()                               ? 0.4
                                                               : 0.45;
  return 6.0 + ceil_div(blocks, 132.0) * steps * step;
}

double of_floats(const Work& w) {
  const Rate rate = w.ieee() ? rate_at_ieee(w) : rate_at_tf32(w);
  // Those had 2e8 operations and more; few take one launch.
  const double start = 6.0 + (rate.start - 6.0) * std::min(1.0, w.flops / 2e8);
  const double time = start + w.bytes / (rate.memory * 1e6) + w.flops / (rate.arithmetic * 1e6);
  const bool apart = w.p.transposed || w.p.groups > 1 || transforms(w);
  return apart ? time : std::max(time, in_sequence(w));
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
  const bool floats = !w.narrow && (w.p.groups == 1 || w.channels >= 8.0);
  double contraction = floats           ? of_floats(w)
                       : w.p.groups > 1 ? of_groups(w)
                       : w.p.transposed ? of_transposed(w)
                                        : of_narrow(w);
  const bool dilated =
      std::max(w.p.dilation_h, w.p.dilation_w) > 1 && std::max(w.p.kernel_h, w.p.kernel_w) > 1;
  if (w.p.transposed && w.p.groups == 1 && dilated && w.unit_stride) contraction *= 1.5;
  return contraction + of_passes(w);
}

}  // namespace cutfuse::conv
