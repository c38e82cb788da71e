#include <algorithm>

#include "core/checked_math.h"
#include "core/status.h"
#include "cutfuse/row_reduce.h"
#include "row_reduce/kernels.h"

namespace cutfuse {
namespace {

using row_reduce::kBlock;
using row_reduce::kColumnBatch;
using row_reduce::kRowBatch;

constexpr int32_t kMaxTensorDims = 64;  // as torch, and the bits of LogSumExpProblem::reduced

/// One dimension, with its stride in x and, if it is kept, in out.
struct Dim {
  int64_t size;
  int64_t stride;
  int64_t out_stride;
};

uint64_t magnitude(int64_t stride) {
  const auto bits = static_cast<uint64_t>(stride);
  return stride < 0 ? 0 - bits : bits;
}

/// The slowest dimension first. One of stride 0 is the slowest: its elements are read again last.
bool slower(const Dim& a, const Dim& b) {
  return magnitude(a.stride) - 1 > magnitude(b.stride) - 1;
}

bool lie_together(const Dim& outer, const Dim& inner) {
  int64_t stride = 0;
  return checked_multiply(inner.size, inner.stride, &stride) && outer.stride == stride &&
         outer.out_stride == inner.size * inner.out_stride;
}

/// Sorts by stride and merges what lies together. The order of summands is free, and kept
/// dimensions carry their strides in out. Returns how many are left, at least 1.
int32_t merge_dims(Dim* dims, int32_t count) {
  const auto end = std::remove_if(dims, dims + count, [](const Dim& d) { return d.size == 1; });
  count = static_cast<int32_t>(end - dims);
  if (count == 0) {
    dims[0] = {1, 0, 0};
    return 1;
  }
  std::sort(dims, dims + count, slower);
  int32_t last = 0;
  for (int32_t d = 1; d < count; ++d) {
    if (lie_together(dims[last], dims[d])) {
      dims[last] = {dims[last].size * dims[d].size, dims[d].stride, dims[d].out_stride};
    } else {
      dims[++last] = dims[d];
    }
  }
  return last + 1;
}

Status fill(const Dim* dims, int32_t count, const char* what, StridedIndex* index,
            StridedIndex* out) {
  CUTFUSE_CHECK(count <= StridedIndex::kMaxDims, Code::kNotSupported,
                "%d %s dimensions that do not lie together; at most %d are supported, make x "
                "contiguous or reshape it",
                count, what, StridedIndex::kMaxDims);
  index->count = count;
  if (out != nullptr) out->count = count;
  for (int32_t d = 0; d < count; ++d) {
    index->sizes[d] = dims[d].size;
    index->strides[d] = dims[d].stride;
    if (out == nullptr) continue;
    out->sizes[d] = dims[d].size;
    out->strides[d] = dims[d].out_stride;
  }
  return {};
}

/// Sizes, their products, and the merged dimensions.
Status fill_dims(const LogSumExpProblem& problem, LogSumExpPlan* plan) {
  CUTFUSE_CHECK(problem.dim_count >= 0 && problem.dim_count <= kMaxTensorDims, Code::kInvalidValue,
                "a tensor of %d dimensions; at most %d are supported", problem.dim_count,
                kMaxTensorDims);
  Dim kept[kMaxTensorDims + 1];
  Dim reduced[kMaxTensorDims + 1];
  int32_t kept_count = 0;
  int32_t reduced_count = 0;
  int64_t elements[2] = {1, 1};  // kept, reduced; a dimension of size 0 hides no overflow
  bool empty[2] = {false, false};
  for (int32_t d = problem.dim_count - 1; d >= 0; --d) {
    const int64_t size = problem.sizes[d];
    CUTFUSE_CHECK(size >= 0, Code::kInvalidValue, "dimension %d has size %lld; 0 is the least", d,
                  static_cast<long long>(size));
    const bool is_reduced = (problem.reduced >> d & 1) != 0;
    const Dim dim = {size, problem.strides[d], is_reduced ? 0 : elements[0]};
    (is_reduced ? reduced[reduced_count++] : kept[kept_count++]) = dim;
    if (size == 0) {
      empty[is_reduced] = true;
      continue;
    }
    CUTFUSE_CHECK(checked_multiply(elements[is_reduced], size, &elements[is_reduced]),
                  Code::kInvalidValue, "the sizes of x multiply to more than 2^63 elements");
  }
  plan->rows = empty[0] ? 0 : elements[0];
  plan->length = empty[1] ? 0 : elements[1];
  if (plan->length == 0) {
    reduced[0] = {0, 0, 0};
    reduced_count = 1;
  }
  if (plan->rows == 0) {
    return {};
  }
  kept_count = merge_dims(kept, kept_count);
  if (Status status = fill(kept, kept_count, "kept", &plan->kept, &plan->kept_out); !status.ok()) {
    return status;
  }
  reduced_count = merge_dims(reduced, reduced_count);
  return fill(reduced, reduced_count, "reduced", &plan->reduced, nullptr);
}

uint64_t last_stride(const StridedIndex& index) {
  return magnitude(index.strides[index.count - 1]);
}

bool may_use_vectors(const LogSumExpPlan& plan) {
  const int64_t vector = 16 / size_of(plan.dtype);
  const StridedIndex& reduced = plan.reduced;
  const int32_t last = reduced.count - 1;
  bool aligned = reduced.strides[last] == 1 && reduced.sizes[last] % vector == 0;
  for (int32_t d = 0; d < last; ++d) aligned = aligned && reduced.strides[d] % vector == 0;
  for (int32_t d = 0; d < plan.kept.count; ++d) {
    aligned = aligned && plan.kept.strides[d] % vector == 0;
  }
  return aligned;
}

/// The least number of threads that a row's length warrants, and more where rows alone would not
/// fill the GPU.
int32_t row_threads(int64_t rows, int64_t length, int32_t sm_count) {
  const int64_t wanted = int64_t(sm_count) * 1024;
  int32_t threads = length <= 256 ? 8 : length <= 4096 ? 32 : kBlock;
  if (threads == 8 && rows * 8 < wanted && length > 8 * kRowBatch / 2) threads = 32;
  if (threads == 32 && rows * 32 < wanted && length > 32 * kRowBatch / 2) threads = kBlock;
  return threads;
}

/// Rows of a block, a power of two: at most those that lie together and a warp reads at once, more
/// where rows are too short to give work to all threads.
int32_t column_width(const StridedIndex& kept, int64_t rows, int64_t length) {
  const int64_t together = kept.sizes[kept.count - 1];
  int32_t width = 1;
  while (width < 32 && width < together) width *= 2;
  while (width < kBlock && int64_t(kBlock / width) * kColumnBatch > length) width *= 2;
  while (width > 1 && width / 2 >= rows) width /= 2;
  return width;
}

int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

/// Splits rows over blocks where there are too few blocks, or so many elements for one thread that
/// its roundings in a row would show.
void split_rows(int64_t blocks, int64_t threads, int64_t batch, int32_t sm_count,
                LogSumExpPlan* plan) {
  constexpr int64_t kFewBatches = 2;
  constexpr int64_t kManyBatches = 1024;
  constexpr int64_t kMaxSplits = 4096;
  const int64_t step = threads * batch;
  int64_t splits = ceil_div(plan->length, step * kManyBatches);
  // Four blocks, of 64 registers a thread, are resident on a multiprocessor.
  const int64_t wanted = int64_t(sm_count) * 4 / blocks;
  splits = std::max(splits, std::min(wanted, plan->length / (step * kFewBatches)));
  splits = std::min(std::max(splits, int64_t(1)), kMaxSplits);
  plan->split_length = std::max(ceil_div(ceil_div(plan->length, splits), step) * step, step);
  plan->splits =
      static_cast<int32_t>(std::max(ceil_div(plan->length, plan->split_length), int64_t(1)));
}

}  // namespace

std::string to_string(const LogSumExpPlan& plan) {
  std::string text = plan.reading == RowReading::kRows ? "rows of " : "columns, ";
  text += std::to_string(plan.width);
  text += plan.reading == RowReading::kRows ? " threads" : " a block";
  if (plan.vectors) text += ", vectors";
  if (plan.splits > 1) text += ", " + std::to_string(plan.splits) + " splits";
  return text;
}

Status plan_logsumexp(const LogSumExpProblem& problem, const DeviceProps& device,
                      LogSumExpPlan* plan) noexcept {
  if (Status status = check_device(device); !status.ok()) return status;
  for (const DType dtype : {problem.dtype, problem.out_dtype}) {
    CUTFUSE_CHECK(dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16,
                  Code::kInvalidValue,
                  "unknown dtype %d; this build has 0 (float32), 1 (float16) and 2 (bfloat16)",
                  static_cast<int>(dtype));
  }
  LogSumExpPlan made;
  made.dtype = problem.dtype;
  made.out_dtype = problem.out_dtype;
  made.device = device.index;
  if (Status status = fill_dims(problem, &made); !status.ok()) return status;
  if (made.rows == 0) {
    *plan = made;
    return {};
  }
  const uint64_t along_row = last_stride(made.reduced);
  const uint64_t across_rows = last_stride(made.kept);
  const bool columns = across_rows != 0 && (along_row == 0 || across_rows < along_row);
  if (columns || made.length <= kColumnBatch) {
    made.reading = RowReading::kColumns;
    made.width = column_width(made.kept, made.rows, made.length);
    split_rows(ceil_div(made.rows, made.width), kBlock / made.width, kColumnBatch, device.sm_count,
               &made);
  } else {
    made.reading = RowReading::kRows;
    made.width = row_threads(made.rows, made.length, device.sm_count);
    made.vectors = may_use_vectors(made);
    split_rows(ceil_div(made.rows, kBlock / made.width), made.width, kRowBatch, device.sm_count,
               &made);
  }
  if (made.splits > 1) {
    CUTFUSE_CHECK(checked_multiply(made.rows, int64_t(made.splits) * int64_t(sizeof(float) * 2),
                                   &made.workspace_bytes),
                  Code::kInvalidValue, "%lld rows in %d parts need more than 2^63 bytes",
                  static_cast<long long>(made.rows), made.splits);
  }
  *plan = made;
  return {};
}

}  // namespace cutfuse
