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

/// Waits for the `threads` threads of a barrier; whether `value` holds for all of them.
__device__ __forceinline__ bool sync_all(bool value, uint32_t barrier, uint32_t threads) {
  uint32_t all;
  asm volatile(
      "{\n"
      ".reg .pred mine, result;\n"
      "setp.ne.u32 mine, %1, 0;\n"
      "barrier.cta.red.and.pred result, %2, %3, mine;\n"
      "selp.u32 %0, 1, 0, result;\n"
      "}\n"
      : "=r"(all)
      : "r"(static_cast<uint32_t>(value)), "r"(barrier), "r"(threads)
      : "memory");
  return all != 0;
}

/// Operands that are staged. Slot 0 holds B's words, slot i + 1 operand i, the two after the last
/// one each column's scale and shift.
template <class Coordinates>
__device__ __forceinline__ int staged_count(const EpilogueArguments& arguments) {
  return min(arguments.program.operand_count, Coordinates::kStagedOperands);
}

/// The bits of slot `slot` at a column, as they lie in memory, if the slot is one of the words or
/// of the per-channel vectors among the first `count` operands.
__device__ __forceinline__ uint32_t load_slot(const EpilogueArguments& arguments, int slot,
                                              int count, int column) {
  if (slot == 0) {
    return arguments.b_words != nullptr ? __ldg(arguments.b_words + column) : 0u;
  }
  const Operand& operand = arguments.program.operands[slot - 1];
  if (slot > count || operand.row_stride != 0) {
    return 0u;
  }
  const int64_t at = column * operand.col_stride;
  return operand.dtype == DType::kFloat32
             ? __ldg(static_cast<const uint32_t*>(operand.data) + at)
             : __ldg(static_cast<const unsigned short*>(operand.data) + at);
}

/// Fills the slots' kColumns columns from `first` on (of `columns`) by kThreads threads, so that
/// the steps wait for memory once and not one by one. Returns whether scale and shift are plain in
/// this thread's columns.
template <class Coordinates, int kColumns, int kThreads>
__device__ __forceinline__ bool stage_operands(const EpilogueArguments& arguments, int first,
                                               int columns, int thread, int32_t* slots) {
  const DeviceProgram& program = arguments.program;
  const int count = staged_count<Coordinates>(arguments);
  bool plain = true;
  for (int n = thread; n < kColumns; n += kThreads) {
    const int column = min(first + n, columns - 1);
    // All loads of a batch are on their way before the first is stored.
    constexpr int kBatch = 8;
    for (int base = 0; base <= count; base += kBatch) {
      uint32_t bits[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        bits[i] = load_slot(arguments, base + i, count, column);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int slot = base + i;
        if (slot > count) continue;
        if (slot > 0 && program.operands[slot - 1].dtype != DType::kFloat32) {
          bits[i] = __float_as_uint(unpack_pair(bits[i], program.operands[slot - 1].dtype).x);
        }
        if (slot == kVarOperand + 1 && arguments.normalises) {
          float value = 1.f / sqrtf(__uint_as_float(bits[i]) + arguments.eps);
          const ConstMatrix& weight = arguments.weight;
          if (weight.data != nullptr) value *= load_value(weight.data, column, weight.dtype);
          bits[i] = __float_as_uint(value);
        }
        slots[slot * kColumns + n] = static_cast<int32_t>(bits[i]);
      }
    }
    if (count + 2 <= Coordinates::kStagedOperands) {
      const FoldedColumn folded =
          fold(program, arguments.affine_steps, row_exponent(slots[n]),
               [&](int operand) { return __int_as_float(slots[(operand + 1) * kColumns + n]); });
      slots[(count + 1) * kColumns + n] = __float_as_int(folded.scale);
      slots[(count + 2) * kColumns + n] = __float_as_int(folded.shift);
      plain &= folded.plain && !row_has_nonfinite(slots[n]);
    } else {
      plain = false;
    }
  }
  return plain;
}

}  // namespace cutfuse::gemm
