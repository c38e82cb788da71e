/// \file
/// A convolution as an implicit GEMM: its filters times what they meet, which the GEMM gathers from
/// images. Tensors are packed first where it cannot read them; fused/ plans the rest.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>

#include "conv/implicit/prepare.h"
#include "conv/plan.h"
#include "conv/problem.h"
#include "core/status.h"
#include "cutfuse/fused.h"
#include "cutfuse/split.h"
#include "fused/estimate.h"
#include "fused/plan.h"

namespace cutfuse::conv::implicit {
namespace {

using gemm::Images;
using shift::ceil_div;

bool is_narrow(const ConvProblem& p) { return p.dtype != DType::kFloat32; }
int32_t planes_of(const ConvProblem& p) { return plane_count({0, 0, 0, p.precision, p.dtype}); }

/// Whether x is read as it is.
bool reads_in_place(const FusedConvProblem& problem) {
  const ConvProblem& p = problem.conv;
  return is_narrow(p) && problem.pixel_stride > 0 && p.channels % 8 == 0;
}

/// What a tensor map can say, see core/driver.h; kernels without one take no more.
Status check_map(const Images& images) {
  const int32_t reach_h = (images.kernel_h - 1) * images.dilation_h;
  const int32_t reach_w = (images.kernel_w - 1) * images.dilation_w;
  const ImageBoxes boxes = gemm::boxes_of(images, nullptr, 1, DType::kFloat16, 1);
  const int32_t corners[] = {boxes.lower_h, boxes.lower_w, boxes.upper_h, boxes.upper_w};
  const bool corners_fit = std::all_of(std::begin(corners), std::end(corners), [](int32_t corner) {
    return corner >= -128 && corner <= 127;
  });
  CUTFUSE_CHECK(
      corners_fit && std::max(reach_h, reach_w) <= 255, Code::kNotSupported,
      "padding %dx%d and a filter over %dx%d pixels: an implicit GEMM takes padding of at "
      "most 128 and filters over at most 256",
      images.pad_h, images.pad_w, reach_h + 1, reach_w + 1);
  CUTFUSE_CHECK(std::max(images.stride_h, images.stride_w) <= 8, Code::kNotSupported,
                "stride %dx%d: an implicit GEMM takes at most 8", images.stride_h, images.stride_w);
  const double bytes = 2.0 * double(images.pixel_stride) * images.height * images.width;
  CUTFUSE_CHECK(bytes < 0x1p40, Code::kNotSupported,
                "images of %.0f bytes; an implicit GEMM takes less than 2^40", bytes);
  return {};
}

Status as_images(const FusedConvProblem& problem, Images* images, FusedProblem* linear) {
  const ConvProblem& given = problem.conv;
  CUTFUSE_CHECK(given.groups == 1 && given.channels > 0 && given.height > 0 && given.width > 0,
                Code::kNotSupported, "%s: an implicit GEMM has images of one group of channels",
                to_string(given).c_str());
  CUTFUSE_CHECK(!given.transposed || (given.stride_h == 1 && given.stride_w == 1),
                Code::kNotSupported, "%s: transposed, an implicit GEMM has a stride of 1",
                to_string(given).c_str());
  const ConvProblem p = as_convolution(given);
  // Products of two sizes fit 64 bits, and what int32 holds is checked by check_map().
  const int64_t reach = std::max((p.kernel_h - 1) * p.dilation_h, (p.kernel_w - 1) * p.dilation_w);
  const int64_t pads = std::max(std::abs(p.pad_h), std::abs(p.pad_w));
  const int64_t walks = std::max(p.out_height * p.stride_h, p.out_width * p.stride_w);
  constexpr int64_t kLimit = int64_t(1) << 30;
  CUTFUSE_CHECK(std::max({reach, pads, walks}) < kLimit, Code::kNotSupported,
                "%s: too large for an implicit GEMM", to_string(given).c_str());
  const auto narrow = [](int64_t value) { return static_cast<int32_t>(value); };
  images->count = narrow(p.batch);
  images->channels = narrow(p.channels);
  images->height = narrow(p.height);
  images->width = narrow(p.width);
  images->out_height = narrow(p.out_height);
  images->out_width = narrow(p.out_width);
  images->kernel_h = narrow(p.kernel_h);
  images->kernel_w = narrow(p.kernel_w);
  images->stride_h = narrow(p.stride_h);
  images->stride_w = narrow(p.stride_w);
  images->pad_h = narrow(p.pad_h);
  images->pad_w = narrow(p.pad_w);
  images->dilation_h = narrow(p.dilation_h);
  images->dilation_w = narrow(p.dilation_w);
  // Of a filter of one tap that meets no padding its pixels are all that is converted.
  const bool inside = p.pad_h == 0 && p.pad_w == 0 && (p.out_height - 1) * p.stride_h < p.height &&
                      (p.out_width - 1) * p.stride_w < p.width;
  const bool one_tap = p.kernel_h == 1 && p.kernel_w == 1 && inside && !given.transposed;
  if (one_tap && !reads_in_place(problem)) {
    images->height = images->out_height;
    images->width = images->out_width;
    images->stride_h = images->stride_w = 1;
  }
  images->pixel_stride =
      reads_in_place(problem) ? problem.pixel_stride : ceil_div(p.channels, 8) * 8;
  images->planes_out = !problem.channels_last;
  if (Status status = check_map(*images); !status.ok()) return status;
  // Exact products of sizes below 2^30 need 128 bits.
  const double rows = double(p.batch) * p.out_height * p.out_width;
  const double pixels = double(p.height) * p.width;
  const double terms = double(p.channels) * images->taps();
  const double padded = double(images->tap_channels()) * images->taps();
  CUTFUSE_CHECK(std::max({rows, pixels, padded}) < double(kLimit), Code::kNotSupported,
                "%s: an implicit GEMM takes less than 2^30 pixels and terms of a sum",
                to_string(given).c_str());
  // As of a linear layer, gemm/problem.cc.
  CUTFUSE_CHECK(is_narrow(p) || terms >= 64, Code::kNotSupported,
                "sums of %.0f terms: the accuracy promise of an implicit GEMM holds from 64 on",
                terms);
  linear->gemm = {narrow(p.batch) * p.out_height * p.out_width, p.out_channels,
                  static_cast<int64_t>(images->taps()) * images->tap_channels(), p.precision,
                  p.dtype};
  linear->program = problem.program;
  linear->tail = problem.tail;
  linear->after = problem.after;
  linear->weight_planes = !is_narrow(p);
  return {};
}

/// The pixels of x that `images` has.
ConstTensor4 pixels_of(const ConvProblem& p, const Images& images, ConstTensor4 x) {
  if (p.transposed) return x;  // at stride 1
  x.strides[2] *= p.stride_h / images.stride_h;
  x.strides[3] *= p.stride_w / images.stride_w;
  return x;
}

/// Filters as those of as_convolution(): [filter][channel][row][tap].
ConstTensor4 filters_of(const ConvProblem& p, const ConstTensor4& weight) {
  const auto [n, c, h, w] = weight.strides;
  if (!p.transposed) return weight;
  const int64_t last = (p.kernel_h - 1) * h + (p.kernel_w - 1) * w;
  return {static_cast<const char*>(weight.data) + last * size_of(p.dtype), {c, n, -h, -w}};
}

/// Of an image, so that waves of blocks are full.
int32_t parts_of(const Images& images, int32_t sm_count) {
  const int64_t pixels = int64_t(images.height) * images.width;
  const int64_t tiles =
      ceil_div(pixels, kTilePixels) * ceil_div(images.pixel_stride, kTileChannels);
  const int64_t slots = int64_t(kResidentBlocks) * sm_count;
  const auto most = static_cast<int32_t>(std::min(tiles, ceil_div(2 * slots, images.count)));
  int32_t best = 1;
  const auto waves = [&](int32_t parts) {
    return double(ceil_div(int64_t(images.count) * parts, slots)) / parts;
  };
  for (int32_t parts = 2; parts <= most; ++parts) {
    if (waves(parts) < 0.97 * waves(best)) best = parts;
  }
  return best;
}

class ImplicitPlan final : public MechanismPlan {
 public:
  ImplicitPlan(const FusedConvProblem& problem, const Images& images,
               std::unique_ptr<fused::FusedPlan> plan)
      : problem_(problem), images_(images), plan_(std::move(plan)) {
    policy_.planes = std::max(planes_of(problem.conv), 1);
    policy_.gemm = plan_->policy();
    policy_.element = policy_.gemm.element;
    const GemmProblem& gemm = plan_->problem().gemm;
    const int64_t planes = std::max(planes_of(problem_.conv), 1);
    fused::Arena packed;
    fits_ = packed.add(planes * gemm.n * gemm.k * 2, &filter_planes_);
    if (!is_narrow(problem_.conv)) fits_ = fits_ && packed.add(gemm.n * 4, &filter_words_);
    packed_bytes_ = packed.size();
    if (!problem_.packed_weight) fits_ = fits_ && arena_.add(packed_bytes_, &packed_);
    if (!reads_in_place(problem_)) {
      const int64_t pixels = int64_t(images_.height) * images_.width;
      fits_ = fits_ &&
              arena_.add(planes * images_.count * pixels * images_.pixel_stride * 2, &x_planes_);
      parts_ = parts_of(images_, device().sm_count);
    }
    if (!is_narrow(problem_.conv)) {
      fits_ = fits_ &&
              arena_.add(int64_t(images_.count) * parts_ * int64_t(sizeof(Measured)), &measured_) &&
              arena_.add(int64_t(images_.count) * 4, &guesses_) &&
              arena_.add(gemm.m * 4, &row_words_);
    }
    fits_ = fits_ && arena_.add(plan_->workspace_bytes(), &inner_);
  }

  bool fits() const { return fits_; }
  const FusedConvProblem& problem() const noexcept override { return problem_; }
  const ConvPolicy& policy() const noexcept override { return policy_; }
  const DeviceProps& device() const noexcept override { return plan_->device(); }
  int64_t workspace_bytes() const noexcept override { return arena_.size(); }
  int64_t packed_bytes() const noexcept override { return packed_bytes_; }
  std::string packed_key() const override;
  std::string describe() const override;

  Status pack(const ConstTensor4& weight, void* packed, void* stream) const noexcept override;
  Status launch(const ConvBuffers& buffers, void* stream) const noexcept override;

 private:
  FusedConvProblem problem_;
  Images images_;
  ConvPolicy policy_;
  std::unique_ptr<fused::FusedPlan> plan_;
  fused::Arena arena_;
  bool fits_ = true;
  int32_t parts_ = 0;
  int64_t packed_bytes_ = 0, filter_planes_ = 0, filter_words_ = 0;  // in what is packed
  int64_t packed_ = 0, x_planes_ = 0, measured_ = 0, guesses_ = 0, row_words_ = 0, inner_ = 0;

  /// Whether the filters are read as they are.
  bool filters_in_place(const ConvBuffers& buffers) const noexcept;
  PrepareParams params_of(const ConstTensor4& weight, void* packed) const noexcept;
};

std::string ImplicitPlan::packed_key() const {
  const ConvProblem& p = problem_.conv;
  std::string key = std::to_string(planes_of(p)) + " planes of taps";
  for (const int64_t number :
       {int64_t(p.dtype), p.channels, p.out_channels, p.kernel_h, p.kernel_w})
    key += " " + std::to_string(number);
  return key + (p.transposed ? " transposed" : "");
}

std::string ImplicitPlan::describe() const {
  const bool narrow = is_narrow(problem_.conv);
  std::string text = problem_.packed_weight ? "the frozen weight is packed\n"
                     : narrow ? "pack weight unless it is channels_last with whole k-tiles\n"
                              : "pack weight\n";
  if (!reads_in_place(problem_)) {
    text += narrow                          ? "x into channels_last"
            : planes_of(problem_.conv) == 2 ? "x into two scaled fp16 planes of pixels"
                                            : "x into one scaled fp16 plane of pixels";
    text += narrow ? "\n" : ", again where its sampled scale was too large\n";
  }
  return text + to_string(problem_.conv) + ": an implicit gemm\n" + plan_->describe();
}

bool ImplicitPlan::filters_in_place(const ConvBuffers& buffers) const noexcept {
  const ConvProblem& p = problem_.conv;
  const auto& strides = buffers.weight.strides;
  const auto follows = [](int64_t size, int64_t stride, int64_t expected) {
    return size == 1 || stride == expected;
  };
  return is_narrow(p) && !p.transposed && p.channels % gemm::kTapAlignment == 0 &&
         strides[1] == 1 && follows(p.kernel_w, strides[3], p.channels) &&
         follows(p.kernel_h, strides[2], p.kernel_w * p.channels) &&
         follows(p.out_channels, strides[0], p.kernel_h * p.kernel_w * p.channels) &&
         reinterpret_cast<uintptr_t>(buffers.weight.data) % 16 == 0;
}

/// What packs the filters; without x.
PrepareParams ImplicitPlan::params_of(const ConstTensor4& weight, void* packed) const noexcept {
  PrepareParams params;
  params.images = images_;
  params.planes = planes_of(problem_.conv);
  params.weight = filters_of(problem_.conv, weight);
  params.filters = static_cast<int32_t>(plan_->problem().gemm.n);
  params.filter_planes = fused::at<void>(packed, filter_planes_);
  params.filter_words = fused::at<int32_t>(packed, filter_words_);
  return params;
}

Status ImplicitPlan::pack(const ConstTensor4& weight, void* packed, void* stream) const noexcept {
  return pack_filters(params_of(weight, packed), stream);
}

Status ImplicitPlan::launch(const ConvBuffers& buffers, void* stream) const noexcept {
  CUTFUSE_CHECK(!reads_in_place(problem_) || reinterpret_cast<uintptr_t>(buffers.x.data) % 16 == 0,
                Code::kInvalidValue, "x at %p must be aligned to 16 bytes", buffers.x.data);
  FusedBuffers inner;
  TurnedOperands operands;
  if (Status status = hand_on(buffers, &operands, &inner); !status.ok()) return status;
  const ConvProblem& p = problem_.conv;
  void* workspace = buffers.workspace;
  void* packed = problem_.packed_weight ? const_cast<void*>(buffers.packed)
                                        : fused::at<void>(workspace, packed_);
  PrepareParams params = params_of(buffers.weight, packed);
  const ConstTensor4 filters = params.weight;
  const bool in_place = !problem_.packed_weight && filters_in_place(buffers);
  if (problem_.packed_weight || in_place) params.weight.data = nullptr;
  params.x = pixels_of(p, images_, buffers.x);
  params.parts = parts_;
  if (!reads_in_place(problem_)) params.x_planes = fused::at<void>(workspace, x_planes_);
  if (!is_narrow(p)) {
    params.measured = fused::at<Measured>(workspace, measured_);
    params.guesses = fused::at<int32_t>(workspace, guesses_);
    params.row_words = fused::at<int32_t>(workspace, row_words_);
  }
  if (Status status = prepare(params, stream); !status.ok()) return status;

  const GemmProblem& gemm = plan_->problem().gemm;
  inner.x = {buffers.x.data, 0, 0, p.dtype};
  if (is_narrow(p)) {
    const void* matrix = in_place ? buffers.weight.data : params.filter_planes;
    inner.weight = {matrix, gemm.k, 1, p.dtype};
  } else {
    inner.weight = {filters.data, 0, 0, p.dtype};
    inner.weight_planes = params.filter_planes;
    inner.weight_words = params.filter_words;
  }
  inner.out = {buffers.out, gemm.n, p.dtype};
  inner.workspace = fused::at<void>(workspace, inner_);
  fused::Linked linked;
  linked.x_planes = reads_in_place(problem_) ? buffers.x.data : params.x_planes;
  linked.x_words = params.row_words;
  std::copy(std::begin(params.x.strides), std::end(params.x.strides), linked.x_strides);
  std::copy(std::begin(filters.strides), std::end(filters.strides), linked.weight_strides);
  return plan_->launch(inner, linked, stream);
}

/// As as_images(), where the device has a kernel for it.
Status find(const FusedConvProblem& problem, const DeviceProps& device, fused::Links* links,
            FusedProblem* linear) {
  links->reads_images = true;
  if (Status status = as_images(problem, &links->images, linear); !status.ok()) return status;
  if (Status status = fused::why_not_linked(*linear, device); !status.ok()) return status;
  CUTFUSE_CHECK(gemm::select_policy(linear->gemm, Source::kImages, device).tile_m > 0,
                Code::kNotSupported, "this build has no implicit GEMM for %s",
                to_string(linear->gemm).c_str());
  return {};
}

/// Microseconds of what packs tensors: of ResNet-50's from a cold L2 (H100).
double preparing(const FusedConvProblem& problem, const Images& images) {
  const ConvProblem& p = problem.conv;
  if (reads_in_place(problem)) return 2.5;
  const double rows = double(p.batch) * images.height;
  const double written = double(images.pixel_stride) * 2.0 * std::max(planes_of(p), 1);
  // Pixels that are skipped within a row come along, and before and after it, if rows are skipped,
  // what else 64 bytes of memory hold.
  const double around = images.height < p.height && !p.transposed ? 48.0 : 0.0;
  const double read = double(p.channels) * (double(size_of(p.dtype)) * double(p.width) + around);
  const double moving = rows * (read + written * images.width) / 2.7e6;
  if (is_narrow(p)) return 6.0 + moving;
  const double weights = problem.packed_weight
                             ? 0.0
                             : double(images.taps()) * double(p.channels) * double(p.out_channels);
  return 8.0 + moving + 4e-6 * weights;
}

}  // namespace

Status expect(const FusedConvProblem& problem, const DeviceProps& device, double* time) {
  fused::Links links;
  FusedProblem linear;
  if (Status status = find(problem, device, &links, &linear); !status.ok()) return status;
  // Of few channels the copy engine fills most of a k-tile with zeros, which takes it longer.
  const double filling = links.images.channels <= 8 ? 1.5 : 1.0;
  *time = filling * fused::expected(linear, links, device) + preparing(problem, links.images);
  // Large filters of few channels at TF32 take 1.0 of it up to 60 us, and then the longer the more:
  // 1.0 to 1.8 of 80 to 500 us, median 1.34 (17 launches; H100, H200).
  const Images& images = links.images;
  const bool one = planes_of(problem.conv) == 1 && !is_narrow(problem.conv);
  if (one && images.channels > 8 && images.channels <= 64 && images.taps() >= 36) {
    *time = std::max(*time, 1.5 * *time - 30.0);
  }
  return {};
}

Status make_plan(const FusedConvProblem& problem, const DeviceProps& device,
                 const ConvPolicy* forced, std::unique_ptr<MechanismPlan>* plan) {
  fused::Links links;
  FusedProblem linear;
  if (Status status = find(problem, device, &links, &linear); !status.ok()) return status;
  GemmPolicy unset;
  unset.source = Source::kImages;
  const bool selects = forced == nullptr || forced->gemm == unset;
  std::unique_ptr<fused::FusedPlan> inner;
  if (Status status = fused::make(linear, device, selects ? nullptr : &forced->gemm, links, &inner);
      !status.ok()) {
    return status;
  }
  auto made = std::make_unique<ImplicitPlan>(problem, links.images, std::move(inner));
  CUTFUSE_CHECK(made->fits(), Code::kInvalidValue, "the workspace of %s needs more than 2^63 bytes",
                to_string(problem.conv).c_str());
  *plan = std::move(made);
  return {};
}

}  // namespace cutfuse::conv::implicit
