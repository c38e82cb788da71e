#include "device/logsumexp.h"
#include "core/current_device.h"
#include "core/status.h"
#include "row_reduce/kernels.h"

namespace cutfuse {

Status logsumexp(const LogSumExpPlan& plan, const void* x, void* out, void* workspace,
                 void* stream) noexcept {
  if (plan.rows == 0) {
    return {};
  }
  CUTFUSE_CHECK(plan.splits == 1 || workspace != nullptr, Code::kInvalidValue,
                "the workspace is null; this plan needs %lld bytes",
                static_cast<long long>(plan.workspace_bytes));
  CurrentDevice current;
  if (Status status = current.enter(plan.device); !status.ok()) return status;
  auto* partials = plan.splits > 1 ? static_cast<LogSumExpPartial*>(workspace) : nullptr;
  const auto reduce =
      plan.reading == RowReading::kRows ? row_reduce::reduce_rows : row_reduce::reduce_columns;
  if (Status status = reduce(plan, x, out, partials, stream); !status.ok()) return status;
  if (partials == nullptr) {
    return {};
  }
  return row_reduce::merge(partials, plan.rows, plan.splits, out, plan.out_dtype, stream);
}

Status merge_logsumexp_partials(const LogSumExpPartial* partials, int64_t rows, int64_t count,
                                void* out, DType out_dtype, const DeviceProps& device,
                                void* stream) noexcept {
  CUTFUSE_CHECK(rows >= 0 && count >= 0, Code::kInvalidValue,
                "%lld rows of %lld partials: sizes must not be negative",
                static_cast<long long>(rows), static_cast<long long>(count));
  if (rows == 0) {
    return {};
  }
  CurrentDevice current;
  if (Status status = current.enter(device.index); !status.ok()) return status;
  return row_reduce::merge(partials, rows, count, out, out_dtype, stream);
}

}  // namespace cutfuse
