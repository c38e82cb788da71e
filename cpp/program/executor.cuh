/// \file
/// Runs a program on the fragment of the result that one thread holds in registers.
///
/// A step is dispatched once for the whole fragment: per fragment of 16 values it would cost four
/// times the 200 cycles that a dispatch takes (H200, 64 values). Values are indexed at compile
/// time only, because a run-time index would put them in local memory.
///
/// Coordinates says where a thread's values are; v[(j * kRows + r) * 2 + c] lies in column pair j:
///   static constexpr int kRows, kColumnPairs, kSize = 2 * kRows * kColumnPairs;
///   static constexpr int kColumnPairStride;  // columns from one pair to the next; even
///   int64_t row(int r);                      // clamped to the matrix, so that loads are legal
///   int64_t column(int j, int c);            // column(0, 0) + j * kColumnPairStride + c, clamped
///   static constexpr bool kPlanes;           // rows are channels of images: see below
///   static constexpr int kStagedOperands;    // per-channel operands below this index are in
///   shared void read_staged(int operand, int j, float* pair);  // memory: the values of column
///   pair j
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/values.cuh"
#include "program/device_program.h"
#include "program/step_math.h"

namespace cutfuse {

namespace executor {

// Column pairs whose operand values are read together, and values that an expensive function is
// computed for together. With more, a fragment of 96 values with 20 other live registers spills at
// the limit of 168 registers (nvcc 13.0).
template <class Coordinates>
constexpr int chunk_pairs() {
  return Coordinates::kSize > 96 || Coordinates::kPlanes ? 4 : 8;
}
template <class Coordinates>
constexpr int chunk_values() {
  constexpr int kSize = Coordinates::kSize;
  return Coordinates::kPlanes ? 8 : kSize > 96 ? 16 : kSize > 64 ? 24 : 32;
}

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

/// True if f is one or two instructions.
constexpr bool is_cheap(Op op) {
  return op == Op::kAdd || op == Op::kSub || op == Op::kMul || op == Op::kMinimum ||
         op == Op::kMaximum || op == Op::kRelu || op == Op::kLeakyRelu || op == Op::kClamp;
}

/// Calls body(0) ... body(kCount - 1), each inlined with its number known. kApart keeps them apart
/// by a loop that the compiler must not unroll: it would do all of them side by side and spill.
template <bool kApart, int kCount, class Body>
__device__ __forceinline__ void for_each_chunk(const Body& body) {
  if constexpr (kApart) {
#pragma unroll 1
    for (int turn = 0; turn < kCount; ++turn) {
#pragma unroll
      for (int chunk = 0; chunk < kCount; ++chunk) {
        if (chunk == turn) body(chunk);
      }
    }
  } else {
#pragma unroll
    for (int chunk = 0; chunk < kCount; ++chunk) body(chunk);
  }
}

/// Elements from an operand's start to its row of fragment row r. Coordinates whose rows do not lie
/// evenly overload it in their namespace.
template <class Coordinates>
__device__ __forceinline__ int64_t row_offset(const Coordinates& at, int r,
                                              const Operand& operand) {
  if constexpr (Coordinates::kPlanes) {
    return at.row_offset(r, operand);
  } else {
    return at.row(r) * operand.row_stride;
  }
}

/// Reads one row of an operand at the fragment's columns.
template <class Coordinates>
class RowReader {
 public:
  __device__ RowReader(const Operand& operand, const Coordinates& at)
      : at_(at),
        first_(at.column(0, 0)),
        col_stride_(operand.col_stride),
        last_(static_cast<int>(at.column(Coordinates::kColumnPairs - 1, 1) - first_)),
        dtype_(operand.dtype) {
    const uintptr_t pair_bytes = dtype_ == DType::kFloat32 ? 8 : 4;
    const bool aligned = (reinterpret_cast<uintptr_t>(operand.data) & (pair_bytes - 1)) == 0 &&
                         operand.row_stride % 2 == 0 && first_ % 2 == 0;
    // Opaque, so that no column's index is hoisted out of the steps' loop into its own register.
    asm volatile("" : "+r"(last_));
    // Voted on, so that the branch is uniform.
    pairs_ = !Coordinates::kPlanes &&
             __all_sync(__activemask(), aligned && col_stride_ == 1 && last_ == kLast);
  }

  static constexpr int kChunkPairs = chunk_pairs<Coordinates>();

  /// values[2 * j + c] = data[row_offset + column(first + j, c) * col_stride].
  __device__ __forceinline__ void read(const void* data, int64_t row_offset, int first,
                                       float (&values)[2 * kChunkPairs]) const {
    const int64_t base = row_offset + first_ * col_stride_;
    if constexpr (Coordinates::kPlanes) {
#pragma unroll
      for (int k = 0; k < 2 * kChunkPairs; ++k) {
        if (first + k / 2 < Coordinates::kColumnPairs) {
          const int64_t column = at_.column(first + k / 2, k % 2);
          values[k] = load_value(data, at_.legal(row_offset + column * col_stride_), dtype_);
        }
      }
    } else if (pairs_) {
      const bool wide = dtype_ == DType::kFloat32;
#pragma unroll
      for (int j = 0; j < kChunkPairs; ++j) {
        if (first + j < Coordinates::kColumnPairs) {
          const int64_t at = base + (first + j) * Coordinates::kColumnPairStride;
          const float2 pair =
              wide ? __ldg(reinterpret_cast<const float2*>(static_cast<const float*>(data) + at))
                   : unpack_pair(__ldg(reinterpret_cast<const uint32_t*>(
                                     static_cast<const uint16_t*>(data) + at)),
                                 dtype_);
          values[2 * j] = pair.x;
          values[2 * j + 1] = pair.y;
        }
      }
    } else {
      int last = last_;
      asm volatile("" : "+r"(last));  // else all offsets are computed early and spilled
#pragma unroll
      for (int k = 0; k < 2 * kChunkPairs; ++k) {
        if (first + k / 2 < Coordinates::kColumnPairs) {
          const int column = (first + k / 2) * Coordinates::kColumnPairStride + k % 2;
          values[k] = load_value(data, base + min(column, last) * col_stride_, dtype_);
        }
      }
    }
  }

 private:
  const Coordinates& at_;
  static constexpr int kLast = (Coordinates::kColumnPairs - 1) * Coordinates::kColumnPairStride + 1;

  int64_t first_;
  int64_t col_stride_;
  int last_;  // from the first column to the last one that the matrix has
  DType dtype_;
  bool pairs_;  // two values by one load
};

/// v = f(v, o[row], b) with one value for each row: constants, a scalar or a per-row vector.
template <Op kOp, class Coordinates>
__device__ __forceinline__ void apply_rows(float (&v)[Coordinates::kSize],
                                           const float (&o)[Coordinates::kRows], float b) {
  constexpr int kValues = chunk_values<Coordinates>();
  for_each_chunk<!is_cheap(kOp), ceil_div(Coordinates::kSize, kValues)>([&](int chunk) {
#pragma unroll
    for (int k = 0; k < kValues; ++k) {
      const int i = chunk * kValues + k;
      if (i < Coordinates::kSize) v[i] = evaluate<kOp>(v[i], o[i / 2 % Coordinates::kRows], b);
    }
  });
}

/// v = f(v, o[column]): a per-channel vector.
template <Op kOp, class Coordinates>
__device__ __forceinline__ void apply_vector(float (&v)[Coordinates::kSize], const Operand& operand,
                                             int index, const Coordinates& at) {
  constexpr int kChunkPairs = chunk_pairs<Coordinates>();
  constexpr bool kApart = !is_cheap(kOp) || Coordinates::kSize > 64 || Coordinates::kPlanes;
  const bool staged = index < Coordinates::kStagedOperands;
  const RowReader<Coordinates> reader(operand, at);
  for_each_chunk<kApart, ceil_div(Coordinates::kColumnPairs, kChunkPairs)>([&](int chunk) {
    const int first = chunk * kChunkPairs;
    float o[2 * kChunkPairs];
    if constexpr (Coordinates::kStagedOperands > 0) {
      if (staged) {
#pragma unroll
        for (int j = 0; j < kChunkPairs; ++j) {
          if (first + j < Coordinates::kColumnPairs) at.read_staged(index, first + j, &o[2 * j]);
        }
      }
    }
    if (!staged) reader.read(operand.data, 0, first, o);
#pragma unroll
    for (int k = 0; k < 2 * kChunkPairs * Coordinates::kRows; ++k) {
      constexpr int kPairValues = 2 * Coordinates::kRows;
      const int i = first * kPairValues + k;
      if (i < Coordinates::kSize) {
        v[i] = evaluate<kOp>(v[i], o[k / kPairValues * 2 + k % 2], 0.f);
      }
    }
  });
}

/// v = f(v, o[row, column]): a full tensor.
template <Op kOp, class Coordinates>
__device__ __forceinline__ void apply_matrix(float (&v)[Coordinates::kSize], const Operand& operand,
                                             const Coordinates& at) {
  constexpr int kChunkPairs = chunk_pairs<Coordinates>();
  constexpr int kChunks = ceil_div(Coordinates::kColumnPairs, kChunkPairs);
  const RowReader<Coordinates> reader(operand, at);
  constexpr bool kApart = !is_cheap(kOp) || Coordinates::kSize > 64 || Coordinates::kPlanes;
  for_each_chunk<kApart, kChunks * Coordinates::kRows>([&](int chunk) {
    const int r = chunk / kChunks;
    const int first = chunk % kChunks * kChunkPairs;
    float o[2 * kChunkPairs];
    reader.read(operand.data, row_offset(at, r, operand), first, o);
#pragma unroll
    for (int k = 0; k < 2 * kChunkPairs; ++k) {
      const int j = first + k / 2;
      if (j < Coordinates::kColumnPairs) {
        const int i = (j * Coordinates::kRows + r) * 2 + k % 2;
        v[i] = evaluate<kOp>(v[i], o[k], 0.f);
      }
    }
  });
}

template <Op kOp, class Coordinates>
__device__ __forceinline__ void apply_binary(float (&v)[Coordinates::kSize], const Step& step,
                                             const DeviceProgram& program, const Coordinates& at) {
  float o[Coordinates::kRows];
  if (step.operand >= 0) {
    const Operand& operand = program.operands[step.operand];
    if (operand.col_stride != 0) {
      if (operand.row_stride == 0) {
        apply_vector<kOp>(v, operand, step.operand, at);
      } else {
        apply_matrix<kOp>(v, operand, at);
      }
      return;
    }
#pragma unroll
    for (int r = 0; r < Coordinates::kRows; ++r) {
      o[r] = load_value(operand.data, row_offset(at, r, operand), operand.dtype);
    }
  } else {
#pragma unroll
    for (int r = 0; r < Coordinates::kRows; ++r) o[r] = step.constants[0];
  }
  apply_rows<kOp, Coordinates>(v, o, 0.f);
}

}  // namespace executor

/// v = program(v) from step `first` on, before step `end`. The threads of a warp that call it are
/// the same for every step.
template <class Coordinates>
__device__ __forceinline__ void execute(const DeviceProgram& program,
                                        float (&v)[Coordinates::kSize], const Coordinates& at,
                                        int first = 0, int end = kMaxDeviceSteps) {
  const int count = min(program.count, end);
  Step next = program.steps[min(first, kMaxDeviceSteps - 1)];
#pragma unroll 1
  for (int i = first; i < count; ++i) {
    const Step step = next;
    next = program.steps[min(i + 1, kMaxDeviceSteps - 1)];  // its latency hides behind this step
    visit(step.op, [&](auto tag) {
      constexpr Op kOp = decltype(tag)::value;
      if constexpr (is_binary(kOp)) {
        executor::apply_binary<kOp>(v, step, program, at);
      } else {
        float a[Coordinates::kRows];
#pragma unroll
        for (int r = 0; r < Coordinates::kRows; ++r) a[r] = step.constants[0];
        executor::apply_rows<kOp, Coordinates>(v, a, step.constants[1]);
      }
    });
  }
}

}  // namespace cutfuse
