/// \file
/// A fused convolution: convolution -> program -> batch_norm -> program, planned once and run many
/// times, straight from and to NCHW memory.
#pragma once

#include <cstdint>
#include <string>

#include "cutfuse/batch_norm.h"
#include "cutfuse/device.h"
#include "cutfuse/export.h"
#include "cutfuse/fused.h"
#include "cutfuse/gemm.h"
#include "cutfuse/program.h"
#include "cutfuse/status.h"
#include "cutfuse/types.h"

namespace cutfuse {

/// Sizes and arguments of torch's conv2d, or conv_transpose2d if `transposed`. Zeros surround the
/// image: pad_h rows above, pad_w columns to the left, and as many below and to the right as the
/// output's size needs.
struct ConvProblem {
  int64_t batch = 0;
  int64_t channels = 0;  ///< of x, in all groups
  int64_t height = 0;
  int64_t width = 0;
  int64_t out_channels = 0;  ///< in all groups
  int64_t kernel_h = 1;
  int64_t kernel_w = 1;
  int64_t stride_h = 1;
  int64_t stride_w = 1;
  int64_t pad_h = 0;
  int64_t pad_w = 0;
  int64_t dilation_h = 1;
  int64_t dilation_w = 1;
  int64_t groups = 1;
  int64_t out_height = 0;
  int64_t out_width = 0;
  bool transposed = false;
  Precision precision = Precision::kTf32;  ///< read for fp32 tensors only
  DType dtype = DType::kFloat32;           ///< of x, weight and out
};

/// out = after(tail(program(conv(x, weight)))), out [batch, out_channels, out_height, out_width].
struct FusedConvProblem {
  ConvProblem conv;
  Program program;
  Tail tail = Tail::kNone;     ///< kNone, kBatchNormTrain or kBatchNormEval
  Program after;               ///< must be empty without a tail (append to `program` instead)
  bool packed_weight = false;  ///< the caller brings what pack() wrote (frozen module)
  bool channels_last = false;  ///< of out; x and weight have any strides
  /// Elements between pixels of x where all of them are equally far apart, in the order of out, so
  /// that it may be read as a matrix; 0 otherwise. Of 16-bit tensors a multiple of 8, and only if
  /// their channels are contiguous and x starts at a multiple of 16 bytes; so then do those of a
  /// 1x1 weight, which is dense. Of fp32 tensors to NCHW, 1: x is contiguous NCHW and starts at a
  /// multiple of 16 bytes, and so is and does a 1x1 weight.
  int64_t pixel_stride = 0;
};

/// Kernels that sum in fp32 without tensor cores, of fewer than 8 channels a group: for any filter,
/// or for one size at stride 1 or 2. kSelected stands for the one that suits the problem.
enum class Direct : int32_t { kNone = 0, kSelected = 1, kAny = 2, k3x3 = 3, k5x5 = 5, k7x7 = 7 };

/// Everything that selects and configures one compiled kernel.
struct ConvPolicy {
  int32_t tile_n = 0;  ///< pixels of one tensor-core instruction; 0: see those below `stages`
  int32_t planes = 1;  ///< fp16 planes of x and of the weight: 2 at ieee
  DType element = DType::kFloat16;  ///< of the planes, or of the tensors
  int32_t m_blocks = 1;  ///< blocks of 64 output channels at once: 2, or 2 blocks of pixels
  int32_t strip = 0;     ///< output columns of a strip of the image; 0: whole rows
  int32_t chunk = 0;     ///< input channels, with their phases, in shared memory at once
  int32_t stages = 2;    ///< patches of the input in shared memory
  /// If tile_n is 0: of a matrix product, of pixels as they lie (1x1; with Source::kNchw from and
  /// to NCHW) or, with Source::kImages, gathered; nothing else is read then. As it is by default,
  /// but for the source, it stands for the one that is selected.
  GemmPolicy gemm;
  Direct direct = Direct::kNone;  ///< if it is one, tile_n is 0 and nothing else is read
  /// Output channels of one tensor-core instruction whose pixels are read from patches of fp32 NCHW
  /// as they are; then tile_n is 0, gemm.source is kNchw, and nothing else is read.
  int32_t patch_n = 0;
};

CUTFUSE_API bool operator==(const ConvPolicy& a, const ConvPolicy& b) noexcept;
CUTFUSE_API std::string to_string(const ConvProblem& problem);
/// "Direct::k3x3".
CUTFUSE_API std::string to_string(Direct kernel);
/// Can be pasted back as code.
CUTFUSE_API std::string to_string(const ConvPolicy& policy);

/// A tensor [n, c, h, w] that is read, with strides in elements. Of a weight, n and c are torch's
/// first and second dimension, whichever they mean.
struct ConstTensor4 {
  const void* data = nullptr;
  int64_t strides[4] = {0, 0, 0, 0};
};

/// Pointers of one call, all on the plan's device unless said otherwise.
struct ConvBuffers {
  ConstTensor4 x;
  ConstTensor4 weight;           ///< read also when it is packed, to repair non-finite results
  const void* packed = nullptr;  ///< if problem.packed_weight; 256-byte aligned
  /// Host arrays. Strides of an operand are of channels and of pixels of a plane: (0, 0) a scalar,
  /// (s, 0) a per-channel vector, (out_height * out_width, 1) a contiguous tensor of out's shape. A
  /// plan with policy.tile_n 0 takes any strides, unless it gathers pixels, or is direct, or reads
  /// planes, and writes NCHW.
  const Operand* operands = nullptr;
  int32_t operand_count = 0;
  const Operand* after_operands = nullptr;
  int32_t after_operand_count = 0;
  void* out = nullptr;  ///< contiguous in its layout; overlaps no input
  BatchNormBuffers batch_norm;
  void* workspace = nullptr;         ///< ConvPlan::workspace_bytes, 256-byte aligned
  float promotion = 1.f + 0x1p-23f;  ///< as in FusedBuffers
};

/// An immutable plan for one problem on one device; may be run from several threads at once.
class CUTFUSE_API ConvPlan {
 public:
  virtual ~ConvPlan() = default;
  virtual const FusedConvProblem& problem() const noexcept = 0;
  virtual const ConvPolicy& policy() const noexcept = 0;
  virtual const DeviceProps& device() const noexcept = 0;
  virtual int64_t workspace_bytes() const noexcept = 0;
  /// Bytes that pack() writes.
  virtual int64_t packed_bytes() const noexcept = 0;
  /// Equal keys: what pack() writes for one plan serves the other.
  virtual std::string packed_key() const = 0;
  virtual std::string describe() const = 0;
};

/// kInvalidValue / kInvalidShape / kNotSupported if the problem is invalid or no kernel takes it.
CUTFUSE_API Status why_not(const FusedConvProblem& problem, const DeviceProps& device) noexcept;

/// kNotSupported, in words for `explain`, if PyTorch's own kernels are expected to be faster.
CUTFUSE_API Status why_slower(const FusedConvProblem& problem, const DeviceProps& device) noexcept;

/// As make_plan() of a linear problem.
CUTFUSE_API Status make_conv_plan(const FusedConvProblem& problem, const DeviceProps& device,
                                  const ConvPolicy* forced, ConvPlan** plan) noexcept;
CUTFUSE_API void destroy_conv_plan(ConvPlan* plan) noexcept;

/// Compiled policies as far as they are compiled: the rest of each is chosen by the problem.
/// Returns how many there are and writes the first `capacity`.
CUTFUSE_API int32_t compiled_policies(ConvPolicy* policies, int32_t capacity) noexcept;

/// Writes the weight as the plan's kernel reads it, to packed_bytes() at a multiple of 256 bytes.
CUTFUSE_API Status pack(const ConvPlan& plan, const ConstTensor4& weight, void* packed,
                        void* stream) noexcept;

/// As run() of a linear plan: launches only, deterministic, safe under graph capture.
CUTFUSE_API Status run(const ConvPlan& plan, const ConvBuffers& buffers, void* stream) noexcept;

}  // namespace cutfuse
