/// \file
/// What a call's buffers are to a plan's kernels.
#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

#include "core/status.h"
#include "device/logsumexp.h"
#include "fused/plan.h"
#include "gemm/turned.h"

namespace cutfuse::fused {

Status check_memory(const char* name, const void* memory, int64_t bytes) noexcept {
  const bool aligned = memory != nullptr && reinterpret_cast<uintptr_t>(memory) % 256 == 0;
  CUTFUSE_CHECK(bytes == 0 || aligned, Code::kInvalidValue,
                "%s %p must be %lld bytes of device memory aligned to 256 bytes", name, memory,
                static_cast<long long>(bytes));
  return {};
}

Status check(Tail tail, const BatchNormBuffers& bn) noexcept {
  const bool training = tail == Tail::kBatchNormTrain;
  if (!training && tail != Tail::kBatchNormEval) return {};
  CUTFUSE_CHECK(!training || (bn.save_mean != nullptr && bn.save_invstd != nullptr),
                Code::kInvalidValue, "training needs save_mean and save_invstd, got null");
  CUTFUSE_CHECK(!training || bn.running_mean == nullptr || bn.momentum >= 0.0 ||
                    bn.num_batches_tracked != nullptr,
                Code::kInvalidValue,
                "momentum None averages over num_batches_tracked, which is null");
  const bool mean = bn.running_mean != nullptr, var = bn.running_var != nullptr;
  CUTFUSE_CHECK(mean == var && (mean || training), Code::kInvalidValue,
                "running_mean and running_var must be given together, and always in eval");
  return {};
}

Status FusedPlan::check(const FusedBuffers& buffers) const noexcept try {
  const bool linked_x = links_.reads_planes || links_.reads_images;
  const bool linked_out = links_.writes_planes;
  if ((!linked_x && buffers.x.data == nullptr) || buffers.weight.data == nullptr ||
      (!linked_out && buffers.out.data == nullptr)) {
    return error(Code::kInvalidValue, "x, weight and out must not be null");
  }
  const int64_t needed = arena_.size() > 0 ? workspace_bytes() : 0;
  if (Status status = check_memory("workspace", buffers.workspace, needed); !status.ok()) {
    return status;
  }
  const DType dtype = problem_.gemm.dtype;
  if ((!linked_x && buffers.x.dtype != dtype) || buffers.weight.dtype != dtype ||
      (!linked_out && buffers.out.dtype != dtype)) {
    return error(Code::kInvalidValue, "x, weight and out must have the plan's dtype, %s",
                 to_string(problem_.gemm).c_str());
  }
  if (dtype != DType::kFloat32 && !simt()) {
    for (const ConstMatrix* operand : {&buffers.x, &buffers.weight}) {
      if (operand == &buffers.x && links_.reads_images) continue;
      const int64_t leading = operand == &buffers.x ? problem_.x_leading : problem_.weight_leading;
      CUTFUSE_CHECK(
          reinterpret_cast<uintptr_t>(operand->data) % 16 == 0 && operand->col_stride == 1 &&
              operand->row_stride == leading_of(leading, problem_.gemm.k),
          Code::kInvalidValue,
          "a 16-bit operand at %p has strides (%lld, %lld); it must be aligned to 16 bytes with "
          "strides (%lld, 1)",
          operand->data, static_cast<long long>(operand->row_stride),
          static_cast<long long>(operand->col_stride),
          static_cast<long long>(leading_of(leading, problem_.gemm.k)));
    }
  }
  if (!reduces_rows() && !linked_out && buffers.out.row_stride < problem_.gemm.n) {
    return error(Code::kInvalidValue, "out has row stride %lld, at least N=%lld is needed",
                 static_cast<long long>(buffers.out.row_stride),
                 static_cast<long long>(problem_.gemm.n));
  }
  if (problem_.weight_planes && planes() > 0 &&
      (buffers.weight_planes == nullptr || buffers.weight_words == nullptr)) {
    return error(Code::kInvalidValue, "the plan expects weight planes and words, got null");
  }
  return fused::check(problem_.tail, buffers.batch_norm);
} catch (const std::bad_alloc&) {
  return error(Code::kOutOfMemory, "no host memory to say what is wrong");
}

bool FusedPlan::may_turn(const FusedBuffers& buffers) const noexcept {
  const auto per_channel = [](const Operand* operands, int32_t count) {
    return std::all_of(operands, operands + count,
                       [](const Operand& operand) { return operand.row_stride == 0; });
  };
  const bool narrow = problem_.gemm.dtype != DType::kFloat32;
  const bool aligned =
      reinterpret_cast<uintptr_t>(buffers.out.data) % 16 == 0 && buffers.out.row_stride % 8 == 0;
  const bool reaches = narrow ? aligned || reduces_rows()
                              : can_encode(gemm::turned_boxes(buffers.weight, problem_.gemm.n,
                                                              problem_.gemm.k, policy_.tile_m));
  return reaches && per_channel(buffers.operands, buffers.operand_count) &&
         (!normalises() || per_channel(buffers.after_operands, buffers.after_operand_count));
}

Status bind_programs(const FusedProblem& problem, const FusedBuffers& buffers,
                     gemm::EpilogueArguments* epilogue, DeviceProgram* after) noexcept {
  const BatchNormBuffers& bn = buffers.batch_norm;
  const bool eval = problem.tail == Tail::kBatchNormEval;
  DeviceProgram& program = epilogue->program;
  if (eval) {
    program.operands[gemm::kMeanOperand] = {bn.running_mean, 0, 1, bn.running_dtype};
    program.operands[gemm::kVarOperand] = {bn.running_var, 0, 1, bn.running_dtype};
    program.operands[gemm::kBiasOperand] = {bn.bias, 0, 1, bn.affine_dtype};
    program.operand_count = bn.bias != nullptr ? 3 : 2;
    epilogue->normalises = true;
    epilogue->weight = {bn.weight, 0, 1, bn.affine_dtype};
    epilogue->eps = static_cast<float>(bn.eps);
  }
  if (Status status = append(problem.program, buffers.operands, buffers.operand_count, &program);
      !status.ok()) {
    return status;
  }
  if (eval) {
    append(Op::kSub, gemm::kMeanOperand, &program);
    append(Op::kMul, gemm::kVarOperand, &program);
    if (bn.bias != nullptr) append(Op::kAdd, gemm::kBiasOperand, &program);
  }
  Status status = append(problem.after, buffers.after_operands, buffers.after_operand_count,
                         problem.tail == Tail::kBatchNormTrain ? after : &program);
  epilogue->affine_steps = gemm::count_affine_steps(program);
  return status;
}

Status FusedPlan::bind(const FusedBuffers& buffers, const Linked& linked, gemm::GemmCall* call,
                       DeviceProgram* after) const noexcept {
  void* workspace = buffers.workspace;
  const auto [m, n, k, precision, dtype] = problem_.gemm;
  gemm::EpilogueArguments& epilogue = call->epilogue;
  call->promotion = buffers.promotion;
  epilogue.k = k;
  epilogue.a = buffers.x;
  epilogue.b = buffers.weight;
  if (turned()) {
    std::swap(epilogue.a, epilogue.b);
    call->a_planes = buffers.weight.data;
    call->b_planes = planes() == 0 ? buffers.x.data : at<void>(workspace, x_planes_);
    if (planes() > 0) epilogue.b_words = at<int32_t>(workspace, x_words_);
  } else if (planes() == 0) {
    call->a_planes = links_.reads_images ? linked.x_planes : buffers.x.data;
    call->b_planes = buffers.weight.data;
  } else {
    call->a_planes = splits_x() ? at<void>(workspace, x_planes_) : linked.x_planes;
    call->b_planes =
        problem_.weight_planes ? buffers.weight_planes : at<void>(workspace, weight_planes_);
    epilogue.b_words =
        problem_.weight_planes ? buffers.weight_words : at<int32_t>(workspace, weight_words_);
    if (links_.reads_planes) {
      epilogue.a_exponent = gemm::kBoundedExponent;
      epilogue.a = {linked.x_planes, leading_of(0, k), 1, DType::kFloat16};
    } else {
      epilogue.a_words = splits_x() ? at<int32_t>(workspace, x_words_) : linked.x_words;
    }
    std::copy(std::begin(linked.x_strides), std::end(linked.x_strides), epilogue.x_strides);
    std::copy(std::begin(linked.weight_strides), std::end(linked.weight_strides),
              epilogue.weight_strides);
  }
  if (links_.writes_planes) {
    epilogue.out = {linked.out_planes, leading_of(0, n), DType::kFloat16};
    epilogue.out_planes = planes();
  } else if (reduces_rows()) {
    epilogue.row_partials = at<LogSumExpPartial>(workspace, partials_);
  } else {
    epilogue.out = buffers.out;
    const uintptr_t pair_bytes = 2 * static_cast<uintptr_t>(size_of(dtype));
    epilogue.out_pairs = buffers.out.row_stride % 2 == 0 &&
                         reinterpret_cast<uintptr_t>(buffers.out.data) % pair_bytes == 0;
  }
  if (training()) {
    epilogue.partials = at<Moments>(workspace, partials_);
    epilogue.partial_count = partial_count();
    // One block raises the count of batches: no other may read it, as momentum None does.
    if (exchanging_blocks_ != 0 && buffers.batch_norm.momentum >= 0.0 &&
        exchanging_blocks_ + policy_.trailing_blocks <= gemm_->resident_blocks()) {
      call->blocks = exchanging_blocks_;
      gemm::MomentExchange& exchange = epilogue.exchange;
      exchange.arrivals = at<uint32_t>(workspace, counts_);
      exchange.clears = splits_x() ? 0 : exchange_counts();
      exchange.expected =
          static_cast<uint32_t>(turned() ? (m + policy_.tile_n - 1) / policy_.tile_n
                                         : gemm::padded_tile_rows(problem_.gemm, policy_));
      exchange.batch_norm = buffers.batch_norm;
      has_bounds_only(problem_.after, &exchange.lowest, &exchange.highest);
    }
  }
  if (splits_k()) {
    epilogue.out = {at<void>(workspace, slices_), slice_row_stride(), DType::kFloat32};
    epilogue.out_pairs = true;
  }
  if (Status status = bind_programs(problem_, buffers, &epilogue, after); !status.ok()) {
    return status;
  }
  if (turned() && !training()) {
    // Infinite ones where the last step, or the unset first one, is another.
    const DeviceProgram& program = epilogue.program;
    bounds_of(program.steps[std::max(program.count - 1, 0)], &epilogue.exchange.lowest,
              &epilogue.exchange.highest);
  }
  return {};
}

}  // namespace cutfuse::fused
