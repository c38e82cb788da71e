// What is not emulated of the library says so, and what asks for a device is answered.
#include "core/build.h"
#include "core/driver.h"
#include "core/status.h"
#include "cutfuse/device.h"
#include "cutfuse/row_reduce.h"
#include "cutfuse/version.h"
#include "row_reduce/kernels.h"
#include "skinny/multiply.h"

namespace cutfuse {
namespace {

Status not_emulated() { return error(Code::kNotSupported, "not emulated"); }

}  // namespace

Status cuda_error(int, const char*) noexcept { return not_emulated(); }
int32_t device_count() noexcept { return 1; }
Status query_device(int32_t, DeviceProps*) noexcept { return not_emulated(); }
Status check_device(const DeviceProps&) noexcept { return {}; }
int32_t abi_version() noexcept { return kAbiVersion; }
const char* version() noexcept { return "0"; }
const char* build_info() noexcept { return "emulated"; }
const char* architectures() noexcept { return "emulated"; }

bool can_encode(const TensorBoxes&) noexcept { return false; }
Status encode_boxes(const TensorBoxes&, CUtensorMap*) noexcept { return not_emulated(); }

std::string to_string(const LogSumExpPlan&) { return "not emulated"; }
Status plan_logsumexp(const LogSumExpProblem&, const DeviceProps&, LogSumExpPlan*) noexcept {
  return not_emulated();
}
Status logsumexp(const LogSumExpPlan&, const void*, void*, void*, void*) noexcept {
  return not_emulated();
}
Status merge_logsumexp_partials(const LogSumExpPartial*, int64_t, int64_t, void*, DType,
                                const DeviceProps&, void*) noexcept {
  return not_emulated();
}
Status row_reduce::merge(const LogSumExpPartial*, int64_t, int64_t, void*, DType, void*) noexcept {
  return not_emulated();
}
skinny::Shares skinny::select_parts(int64_t, int64_t, int64_t, int32_t) noexcept {
  return {1, 1.0};
}
Status skinny::multiply(const ConstMatrix&, const ConstMatrix&, int64_t, int64_t, int64_t, int32_t,
                        const Matrix&, int64_t, void*) noexcept {
  return not_emulated();
}

}  // namespace cutfuse
