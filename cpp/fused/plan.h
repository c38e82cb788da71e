/// \file
/// One contraction with its program and tail as stages over a workspace arena.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "core/checked_math.h"
#include "cutfuse/fused.h"
#include "cutfuse/split.h"
#include "gemm/launcher.h"
#include "split/split.h"

namespace cutfuse::fused {

/// Hands out aligned pieces of the workspace, in order.
class Arena {
 public:
  /// Offset of a piece of `bytes`, or false if the total overflows.
  bool add(int64_t bytes, int64_t* offset) {
    constexpr int64_t kAlignment = 256;
    *offset = size_;
    return checked_round_up(bytes, kAlignment, &bytes) && checked_add(size_, bytes, &size_);
  }
  int64_t size() const { return size_; }

 private:
  int64_t size_ = 0;
};

template <class T>
T* at(void* workspace, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(workspace) + offset);
}

/// Elements between rows of an operand: of its planes, or of the tensor itself.
inline int64_t leading_of(int64_t given, int64_t k) { return given != 0 ? given : (k + 7) / 8 * 8; }

/// What a contraction shares with what runs before and after it.
struct Links {
  bool reads_planes = false;   ///< x comes as planes at gemm::kBoundedExponent, unless 16-bit
  bool writes_planes = false;  ///< out goes as such planes, unless 16-bit
  /// x comes as planes of `images` with words of their own, unless 16-bit or read as NCHW; so does
  /// the weight, and k is padded as they are.
  bool reads_images = false;
  gemm::Images images = {};
};

/// Where the links' tensors are in one call.
struct Linked {
  const void* x_planes = nullptr;    ///< or the 16-bit images
  const int32_t* x_words = nullptr;  ///< of images
  void* out_planes = nullptr;
  int64_t x_strides[4] = {}, weight_strides[4] = {};  ///< as gemm::EpilogueArguments has them
};

/// GemmPolicy::arch of plans without tensor cores: of few rows, where split_k is all that policies
/// say; and of small problems in one launch, where tile_m, tile_n and split_k are a simt::Tile and
/// cluster_m blocks share out its K.
inline constexpr int32_t kSkinny = 0;
inline constexpr int32_t kSimt = 1;

/// Whether a contraction has so few rows or columns that it is planned so.
bool is_skinny(const FusedProblem& problem) noexcept;

/// Whether the contraction and its program are all there is to do, as simt::multiply() does it.
bool is_simple(const FusedProblem& problem, const Links& links) noexcept;

/// Index in simt::kTiles of what a policy of small problems says, or -1.
int32_t simt_tile(const GemmPolicy& policy) noexcept;

/// why_not() of what tensor cores alone multiply here, which excludes the short sums of
/// is_simple().
Status why_not_linked(const FusedProblem& problem, const DeviceProps& device) noexcept;

/// Whether the program may run in a pass of its own, after the parts of K are added.
bool may_split_k(const FusedProblem& problem, const Links& links) noexcept;

/// Whether `program` is one step at most, and that one bounds.
bool has_bounds_only(const Program& program, float* lowest, float* highest) noexcept;

/// Blocks of a contraction that also normalises by the batch's statistics, or 0: batch norm is a
/// pass of its own, as it is where more than bounds follow, and of most results of 16 bits.
int32_t exchanging_blocks(const FusedProblem& problem, const GemmPolicy& policy,
                          const DeviceProps& device) noexcept;

/// Rows that a policy's trailing blocks split while those before are multiplied: of x or of the
/// weight, from first_row on.
struct TrailingPart {
  bool of_x = false;
  int32_t first_row = 0;  ///< a multiple of tile_rows, or all rows: none trails
  int32_t tile_rows = 0;
  int32_t tiles = 0;  ///< of all rows
};
TrailingPart trailing_part(const FusedProblem& problem, const GemmPolicy& policy,
                           const DeviceProps& device) noexcept;

/// Microseconds that this takes off a call.
double trailing_gain(const FusedProblem& problem, const GemmPolicy& policy,
                     const DeviceProps& device) noexcept;

/// Trailing blocks that take nothing from the contraction and are worth a launch, or 0.
int32_t select_trailing_blocks(const FusedProblem& problem, const Links& links,
                               const GemmPolicy& policy, const DeviceProps& device) noexcept;

/// The part of check() that is about them.
Status check_trailing(const FusedProblem& problem, const GemmPolicy& policy, const Links& links,
                      const DeviceProps& device);

/// kNotSupported or kInvalidValue unless `policy` is compiled and runs the problem.
Status check(const FusedProblem& problem, const GemmPolicy& policy, const Links& links,
             const DeviceProps& device);

/// kInvalidValue unless `memory`, called `name`, can be so many bytes of device memory.
Status check_memory(const char* name, const void* memory, int64_t bytes) noexcept;

/// kInvalidValue unless a call has what the tail reads and writes.
Status check(Tail tail, const BatchNormBuffers& buffers) noexcept;

/// The policy of a plan for which none is forced.
GemmPolicy select_policy(const FusedProblem& problem, const Links& links,
                         const DeviceProps& device) noexcept;

/// The same among those of tensor cores and of few rows, as convolutions have it: of their pixels
/// small products were not measured.
GemmPolicy select_large_policy(const FusedProblem& problem, const Links& links,
                               const DeviceProps& device) noexcept;

/// The same among these that do not turn the problem over.
GemmPolicy select_straight_policy(const FusedProblem& problem, const Links& links,
                                  const DeviceProps& device) noexcept;

/// Whether a kernel of Source::kTurned runs the problem, whose program is affine steps and bounds
/// alone, or in 16 bits a sigmoid (with others ptxas takes minutes); under logsumexp 16 bits alone.
/// Of its tensors see FusedPlan::running().
bool may_turn(const FusedProblem& problem, const Links& links) noexcept;

/// The product as the kernel of a plan sees it.
GemmProblem multiplied(const GemmProblem& problem, const GemmPolicy& policy) noexcept;

/// Steps and operands of the epilogue, and of the program that follows training.
Status bind_programs(const FusedProblem& problem, const FusedBuffers& buffers,
                     gemm::EpilogueArguments* epilogue, DeviceProgram* after) noexcept;

/// A call between its two steps.
struct Prepared {
  gemm::GemmCall call;
  DeviceProgram after;  ///< what follows training's batch norm
};

class FusedPlan final : public Plan {
 public:
  FusedPlan(const FusedProblem& problem, const DeviceProps& device, const GemmPolicy& policy,
            const Links& links)
      : problem_(problem),
        device_(device),
        policy_(policy),
        links_(links),
        exchanging_blocks_(exchanging_blocks(problem, policy, device)),
        trailing_(policy.trailing_blocks != 0 ? trailing_part(problem, policy, device)
                                              : TrailingPart{}) {}

  const FusedProblem& problem() const noexcept override { return problem_; }
  const GemmPolicy& policy() const noexcept override { return policy_; }
  const DeviceProps& device() const noexcept override { return device_; }
  int64_t workspace_bytes() const noexcept override {
    const int64_t others = otherwise_ != nullptr ? otherwise_->workspace_bytes() : 0;
    return std::max(arena_.size(), others);
  }
  std::string describe() const override;
  /// Its two parts: what prepare() launches, with line ends, and multiply().
  std::string describe_preparation() const;
  std::string describe_product() const;

  Status lay_out();
  /// Of a plan that turns over: what runs instead where the weight or the program does not allow
  /// it.
  void otherwise(std::unique_ptr<FusedPlan> plan) { otherwise_ = std::move(plan); }
  /// On the current device, as all of these.
  Status launch(const FusedBuffers& buffers, const Linked& linked, void* stream) const noexcept;
  /// What runs such a call: this plan, or the one that does not turn over.
  const FusedPlan& running(const FusedBuffers& buffers) const noexcept {
    return turned() && !may_turn(buffers) ? *otherwise_ : *this;
  }
  /// The first step of launch(): splits, and folds the program. Does not read linked planes.
  Status prepare(const FusedBuffers& buffers, const Linked& linked, Prepared* prepared,
                 void* stream) const noexcept;
  /// The second, after prepare() of the same buffers.
  Status multiply(const FusedBuffers& buffers, Prepared* prepared, void* stream) const noexcept;

 private:
  FusedProblem problem_;
  DeviceProps device_;
  GemmPolicy policy_;
  Links links_;
  int32_t exchanging_blocks_;
  TrailingPart trailing_;
  Arena arena_;
  int64_t x_planes_ = 0, x_words_ = 0, weight_planes_ = 0, weight_words_ = 0, partials_ = 0;
  int64_t slices_ = 0, folded_ = 0, counts_ = 0;
  std::unique_ptr<gemm::Launcher> gemm_;
  std::unique_ptr<FusedPlan> otherwise_;

  /// Otherwise operands are summed in fp32 as they are: few rows, or a small problem.
  bool tensor_cores() const { return policy_.arch >= 80; }
  bool skinny() const { return policy_.arch == kSkinny; }
  bool simt() const { return policy_.arch == kSimt; }
  /// fp16 planes of each operand, or of the weight alone where x is read as NCHW; 0: the tensors
  /// themselves are multiplied.
  int32_t planes() const {
    const bool tensors = !tensor_cores() || (links_.images.planes_in && policy_.promote_k == 0);
    return tensors ? 0 : plane_count(problem_.gemm);
  }
  bool splits_x() const { return planes() > 0 && !links_.reads_planes && !links_.reads_images; }
  bool turned() const { return policy_.source == Source::kTurned; }
  bool splits_weight() const { return planes() > 0 && !problem_.weight_planes && !turned(); }
  bool normalises() const { return problem_.tail == Tail::kBatchNormEval; }
  /// Whether the copy engine brings the weight's rows, and operands are per channel.
  bool may_turn(const FusedBuffers& buffers) const noexcept;
  bool empty() const { return problem_.gemm.m == 0 || problem_.gemm.n == 0; }
  bool training() const { return problem_.tail == Tail::kBatchNormTrain; }
  /// Whether the program runs in a pass after the contraction, which adds the parts of K.
  bool splits_k() const { return (tensor_cores() && policy_.split_k > 1) || skinny(); }
  int64_t slice_row_stride() const { return (problem_.gemm.n + 3) / 4 * 4; }
  int64_t slice_stride() const { return problem_.gemm.m * slice_row_stride(); }
  bool reduces_rows() const { return problem_.tail == Tail::kLogSumExp; }
  /// Features of a tile, over which a row has a partial.
  int32_t tile_features() const { return turned() ? policy_.tile_m : policy_.tile_n; }
  /// Whether the program's first steps are folded before the contraction and not in every tile:
  /// where an SM has one tile at most, another launch would cost more than it saves, unless batch
  /// norm's operands would be read there (up to 15 us from a cold L2; H200). Turned layers' tiles
  /// fold nothing themselves.
  bool folds_ahead() const;
  /// Words of a call that begin at zero: blocks of each column of tiles that have arrived where
  /// they exchange moments; where rows trail, those of each tile that have been split; and where
  /// both do, what says whether all blocks run.
  int32_t exchange_counts() const;
  int32_t gathering_words() const {
    return exchanging_blocks_ != 0 && trailing_.tiles != 0 ? 2 : 0;
  }
  int32_t counts() const { return exchange_counts() + trailing_.tiles + gathering_words(); }
  bool trails(const FusedBuffers& buffers) const;
  /// Rows of a partial of batch norm's moments.
  int32_t partial_rows() const { return turned() ? policy_.tile_n : kPartialRows; }
  /// Partials of the tail's reduction, of each column or of each row.
  int64_t partial_count() const;
  Status check(const FusedBuffers& buffers) const noexcept;
  /// The two operands as split() and split_trailing() take them.
  SplitJob x_job(const FusedBuffers& buffers) const;
  SplitJob weight_job(const FusedBuffers& buffers) const;
  Status split_operands(const FusedBuffers& buffers, bool trails, void* stream) const noexcept;
  /// What split_operands() leaves to do.
  Status split_last_rows(const FusedBuffers& buffers, gemm::GemmCall* call,
                         void* stream) const noexcept;
  Status bind(const FusedBuffers& buffers, const Linked& linked, gemm::GemmCall* call,
              DeviceProgram* after) const noexcept;
};

/// Plans one contraction; `forced` may be null.
Status make(const FusedProblem& problem, const DeviceProps& device, const GemmPolicy* forced,
            const Links& links, std::unique_ptr<FusedPlan>* plan) noexcept;

}  // namespace cutfuse::fused
