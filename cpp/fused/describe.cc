/// \file
/// A plan in words, for `explain`.
#include <string>

#include "fused/plan.h"

namespace cutfuse::fused {

std::string FusedPlan::describe() const { return describe_preparation() + describe_product(); }

std::string FusedPlan::describe_preparation() const {
  std::string text;
  if (empty()) return text;
  const std::string clears =
      exchanging_blocks_ != 0 ? ", clear the counts of blocks that have arrived" : "";
  if (planes() > 0 && (!links_.reads_images || links_.images.planes_in)) {
    const std::string into =
        planes() == 2 ? " into two scaled fp16 planes" : " into one scaled fp16 plane";
    std::string what = splits_x() ? "x" : "";
    if (splits_weight()) what += what.empty() ? "weight" : " and weight";
    if (!what.empty()) text += "split " + what + into;
    if (problem_.weight_planes) text += " (the frozen weight has its planes)";
    if (trailing_.tiles != 0) {
      text += ", of " + std::string(trailing_.of_x ? "x" : "weight") + " the first " +
              std::to_string(trailing_.first_row) + " rows";
    }
    if (splits_x()) text += clears;
    if (!text.empty()) text += "\n";
  }
  if (folds_ahead()) {
    text += "fold the program's leading per-channel affine steps";
    text += (splits_x() ? "" : clears) + "\n";
  }
  if (trailing_.tiles != 0) {
    text += "split the other rows on " + std::to_string(policy_.trailing_blocks) +
            " SMs of their own, while those are multiplied\n";
  }
  return text;
}

std::string FusedPlan::describe_product() const {
  if (empty()) return "nothing to do: the output is empty";
  std::string text = "gemm " + to_string(problem_.gemm);
  if (simt()) {
    text += ", small: summed in fp32 without tensor cores, in tiles of " +
            std::to_string(policy_.tile_m) + "x" + std::to_string(policy_.tile_n) + " and " +
            std::to_string(policy_.split_k) + (policy_.split_k == 1 ? " part" : " parts") + " of K";
    if (policy_.cluster_m > 1) text += ", each of " + std::to_string(policy_.cluster_m) + " blocks";
  } else if (skinny()) {
    text += ", few rows: summed in fp32 without tensor cores";
  } else if (planes() == 2) {
    text += ", three products, promoted every " + std::to_string(policy_.promote_k) + " of K";
  }
  if (tensor_cores()) text += ": " + to_string(policy_);
  if (turned()) {
    text += "\n  turned over";
    if (planes() > 0) {
      text +=
          ": the weight is rounded on its way to the tensor cores; one whose rows are not "
          "contiguous and aligned to 16 bytes, or";
    } else {
      text += reduces_rows() ? ";" : "; where rows of the result are not aligned to 16 bytes, or";
    }
    text += " beside operands that are not per channel: " + to_string(otherwise_->policy());
  }
  if (splits_k()) {
    text += "\nadd " + std::to_string(policy_.split_k) + " parts of K";
  }
  if (problem_.program.count > 0) {
    text += "\n  epilogue: " + to_string(problem_.program);
  }
  if (links_.writes_planes) {
    text += "\n  epilogue: the result as planes of the next gemm";
  }
  if (problem_.tail == Tail::kBatchNormEval) {
    text += "\n  epilogue: batch_norm with the running statistics";
  }
  if (training()) {
    text +=
        "\n  epilogue: batch-norm partials of every " + std::to_string(partial_rows()) + " rows";
    text += exchanging_blocks_ != 0
                ? "; a column's blocks wait for each other, merge them and normalise"
                : "\nmerge partials, update running statistics\nnormalise in place";
    if (gathering_words() != 0) {
      text += "\na pass that merges and normalises, unless all blocks ran at the same time";
    }
  }
  if (reduces_rows()) {
    text += "\n  epilogue: logsumexp partials of every " + std::to_string(tile_features()) +
            " columns; nothing else is stored\nmerge partials";
  }
  if (problem_.after.count > 0) {
    text += (training() ? ", then " : "\n  epilogue: ") + to_string(problem_.after);
  }
  return text;
}

}  // namespace cutfuse::fused
