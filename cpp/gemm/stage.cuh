/// \file
/// A tile's piece of B's words and of the program's per-channel vectors, in shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/values.cuh"
#include "gemm/launcher.h"
#include "gemm/unscale.cuh"
#include "program/fold.cuh"

namespace cutfuse::gemm {

/// Slot 0 holds B's words, slot i + 1 operand i, the last two each column's scale and shift.
template <class Coordinates>
inline constexpr int kScaleSlot = 1 + Coordinates::kStagedOperands;
template <class Coordinates>
inline constexpr int kSlots = kScaleSlot<Coordinates> + 2;

/// What batch norm multiplies by, of a column's variance.
__device__ __forceinline__ float normaliser(const EpilogueArguments& arguments, float variance,
                                            int64_t column) {
  const ConstMatrix& weight = arguments.weight;
  const float inverse = 1.f / sqrtf(variance + arguments.eps);
  return weight.data != nullptr ? inverse * load_value(weight.data, column, weight.dtype) : inverse;
}

__device__ __forceinline__ float load_column(const Operand& operand, int64_t column) {
  return load_value(operand.data, column * operand.col_stride, operand.dtype);
}

/// The scale and shift of a column's first `affine_steps` steps, with read(i) its value of operand
/// i; a scale that is not a number marks a column that is not plain.
template <class Read>
__device__ __forceinline__ float2 fold_column(const EpilogueArguments& arguments,
                                              const Read& read) {
  const FoldedColumn step = fold(arguments.program, arguments.affine_steps, 0, read);
  return {step.plain ? step.scale : __int_as_float(0x7fffffff), step.shift};
}

/// Fills the slots of words and operands, of kColumns columns from `first` on (of `columns`), by
/// kThreads threads, so that what reads them waits for memory once and not one by one.
template <class Coordinates, int kColumns, int kThreads>
__device__ __forceinline__ void stage_operands(const EpilogueArguments& arguments, int first,
                                               int columns, int thread, int32_t* slots) {
  const DeviceProgram& program = arguments.program;
  const auto column_of = [&](int n) { return min(first + n, columns - 1); };
  if (arguments.b_words != nullptr) {
#pragma unroll
    for (int n = thread; n < kColumns; n += kThreads) {
      slots[n] = __ldg(arguments.b_words + column_of(n));
    }
  }
  for (int i = 0; i < min(program.operand_count, Coordinates::kStagedOperands); ++i) {
    const Operand& operand = program.operands[i];
    if (operand.row_stride != 0) continue;
    auto* values = reinterpret_cast<float*>(slots + (i + 1) * kColumns);
#pragma unroll
    for (int n = thread; n < kColumns; n += kThreads) {
      values[n] = load_column(operand, column_of(n));
    }
    if (i != kVarOperand || !arguments.normalises) continue;
    for (int n = thread; n < kColumns; n += kThreads) {
      values[n] = normaliser(arguments, values[n], column_of(n));
    }
  }
}

/// Fills the slots of scale and shift; without folded steps from the slots that this thread filled.
/// Returns whether all of its columns are plain.
template <class Coordinates, int kColumns, int kThreads>
__device__ __forceinline__ bool stage_folded(const EpilogueArguments& arguments, int first,
                                             int columns, int thread, int32_t* slots) {
  constexpr int kSlot = kScaleSlot<Coordinates>;
  const auto column_of = [&](int n) { return min(first + n, columns - 1); };
  const auto put = [&](int n, float2 step) {
    const int word = arguments.b_words != nullptr ? __ldg(arguments.b_words + column_of(n)) : 0;
    slots[kSlot * kColumns + n] = __float_as_int(step.x * power_of_two(-row_exponent(word)));
    slots[(kSlot + 1) * kColumns + n] = __float_as_int(step.y);
    return step.x == step.x && is_plain(word);
  };
  bool plain = true;
  if (arguments.folded != nullptr) {
#pragma unroll
    for (int n = thread; n < kColumns; n += kThreads) {
      plain &= put(n, __ldg(arguments.folded + column_of(n)));
    }
  } else {
#pragma unroll 1
    for (int n = thread; n < kColumns; n += kThreads) {
      plain &= put(n, fold_column(arguments, [&](int operand) {
                     return operand < Coordinates::kStagedOperands
                                ? __int_as_float(slots[(operand + 1) * kColumns + n])
                                : load_column(arguments.program.operands[operand], column_of(n));
                   }));
    }
  }
  return plain;
}

/// Whether a step that is not folded reads a staged operand.
__device__ __forceinline__ bool reads_slots(const EpilogueArguments& arguments) {
  const DeviceProgram& program = arguments.program;
  for (int i = arguments.affine_steps; i < program.count; ++i) {
    const int operand = program.steps[i].operand;
    if (operand >= 0 && program.operands[operand].row_stride == 0) return true;
  }
  return false;
}

/// Stages what an epilogue reads of its tile's columns: the multiply-adds, and words and operands
/// where a step or a row or column that is not plain needs them; rows_plain: no row of the tile is
/// of those. all(x) waits for the kThreads threads and is whether x holds for all of them. Returns
/// whether every column is plain.
template <class Coordinates, int kColumns, int kThreads, class All>
__device__ __forceinline__ bool stage_columns(const EpilogueArguments& arguments, int first,
                                              int columns, bool rows_plain, int thread,
                                              int32_t* slots, const All& all) {
  const bool reads_operands = arguments.folded == nullptr || !rows_plain || reads_slots(arguments);
  if (reads_operands) {
    stage_operands<Coordinates, kColumns, kThreads>(arguments, first, columns, thread, slots);
  }
  const bool plain =
      all(stage_folded<Coordinates, kColumns, kThreads>(arguments, first, columns, thread, slots));
  if (!plain && !reads_operands) {
    stage_operands<Coordinates, kColumns, kThreads>(arguments, first, columns, thread, slots);
    all(true);
  }
  return plain;
}

}  // namespace cutfuse::gemm
