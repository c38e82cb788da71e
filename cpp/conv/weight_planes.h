/// \file
/// A 1x1 convolution's weight as the two planes of a linear layer's, see cutfuse/split.h.
#pragma once

#include <cstdint>

#include "cutfuse/conv.h"
#include "cutfuse/fused.h"
#include "cutfuse/split.h"
#include "cutfuse/status.h"

namespace cutfuse::conv {

/// The planes of [out_channels][channels] and their rows' words, in one piece of memory.
class WeightPlanes {
 public:
  /// `count` 0: the weight is read as it is, and nothing is packed.
  Status lay_out(const GemmProblem& gemm, int32_t count) noexcept {
    constexpr int64_t kAlignment = 256;
    count_ = count;
    if (count == 0) return {};
    PlanesLayout layout;
    if (Status status = planes_layout(gemm.n, gemm.k, count, &layout); !status.ok()) return status;
    words_at_ = (layout.plane_bytes + kAlignment - 1) / kAlignment * kAlignment;
    bytes_ = words_at_ + layout.word_bytes;
    return {};
  }

  int32_t count() const { return count_; }
  int64_t bytes() const { return bytes_; }

  Status pack(const ConstMatrix& weight, const GemmProblem& gemm, void* packed,
              const DeviceProps& device, void* stream) const noexcept {
    if (count_ == 0) return {};
    auto* words = reinterpret_cast<int32_t*>(static_cast<char*>(packed) + words_at_);
    return split(weight, gemm.n, gemm.k, count_, packed, words, device, stream);
  }

  /// Has `linear` read what pack() wrote, if there is anything to pack.
  void bind(const void* packed, FusedBuffers* linear) const noexcept {
    if (count_ == 0) return;
    linear->weight_planes = packed;
    linear->weight_words =
        reinterpret_cast<const int32_t*>(static_cast<const char*>(packed) + words_at_);
  }

 private:
  int32_t count_ = 0;
  int64_t words_at_ = 0, bytes_ = 0;
};

}  // namespace cutfuse::conv
