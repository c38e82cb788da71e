// What is not emulated of the library says so, and what asks for a device is answered.
#include "core/build.h"
#include "core/driver.h"
#include "core/status.h"
#include "cutfuse/device.h"
#include "cutfuse/version.h"

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

}  // namespace cutfuse

// The runtime, as far as host code asks it.
extern "C" {
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 0;
  return cudaErrorInvalidValue;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*,
                                           const cudaLaunchConfig_t* config) {
  *clusters = static_cast<int>(config->gridDim.x / config->attrs[0].val.clusterDim.x);
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "an error"; }
}
