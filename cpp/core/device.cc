#include "cutfuse/device.h"

#include <cuda_runtime_api.h>

#include <cstring>

#include "core/build.h"
#include "core/status.h"

namespace cutfuse {
namespace {

// Every runtime of one major version runs on a driver of that major version or a later one (CUDA
// Compatibility Guide, "minor version compatibility").
constexpr int kRuntimeMajor = CUDART_VERSION / 1000;

// 0 without a driver.
int driver_version() {
  int version = 0;
  if (cudaDriverGetVersion(&version) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  return version;
}

Status check_driver(int version) {
  CUTFUSE_CHECK(version != 0, Code::kCuda,
                "no NVIDIA driver was found; this build needs one for CUDA %d.0 or later: install "
                "it, or keep the tensors on the CPU",
                kRuntimeMajor);
  CUTFUSE_CHECK(version / 1000 >= kRuntimeMajor, Code::kCuda,
                "the NVIDIA driver is for CUDA %d.%d but this build (CUDA %d.%d) needs a driver "
                "for CUDA %d.0 or later; update the driver or build pycutfuse with an older nvcc",
                version / 1000, version % 1000 / 10, kRuntimeMajor, CUDART_VERSION % 1000 / 10,
                kRuntimeMajor);
  return {};
}

}  // namespace

int32_t device_count() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  return count;
}

// None of the runtime calls below creates a context: attributes and properties come from the
// driver's device handle.
Status query_device(int32_t index, DeviceProps* props) noexcept {
  const int driver = driver_version();
  if (Status status = check_driver(driver); !status.ok()) return status;
  const int32_t count = device_count();
  CUTFUSE_CHECK(index >= 0 && index < count, Code::kInvalidValue,
                "there is no CUDA device %d; this process sees %d, numbered from 0 "
                "(CUDA_VISIBLE_DEVICES limits them)",
                index, count);

  const auto attribute = [index](cudaDeviceAttr which, int* value) {
    return cudaDeviceGetAttribute(value, which, index);
  };
  int major = 0;
  int minor = 0;
  int sm_count = 0;
  int shared_bytes = 0;
  int l2_bytes = 0;
  CUTFUSE_CUDA(attribute(cudaDevAttrComputeCapabilityMajor, &major));
  CUTFUSE_CUDA(attribute(cudaDevAttrComputeCapabilityMinor, &minor));
  CUTFUSE_CUDA(attribute(cudaDevAttrMultiProcessorCount, &sm_count));
  CUTFUSE_CUDA(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, &shared_bytes));
  CUTFUSE_CUDA(attribute(cudaDevAttrL2CacheSize, &l2_bytes));
  cudaDeviceProp properties;
  CUTFUSE_CUDA(cudaGetDeviceProperties(&properties, index));  // the only source of the name

  *props = DeviceProps{};
  props->index = index;
  props->major = major;
  props->minor = minor;
  props->sm_count = sm_count;
  props->shared_bytes = shared_bytes;
  props->l2_bytes = l2_bytes;
  props->driver_version = driver;
  std::memcpy(props->name, properties.name, sizeof(props->name) - 1);  // cut to 63 characters
  return {};
}

Status check_device(const DeviceProps& props) noexcept {
  // 9.0 has its own kernels; all others run the sm_80 ones, later devices from embedded PTX.
  CUTFUSE_CHECK(props.major >= 8, Code::kNotSupported,
                "CUDA device %d%s%s%s has compute capability %d.%d but the kernels of this build "
                "(%s) need 8.0 or later; use such a GPU (A100, RTX 30 series and newer) or let "
                "PyTorch run the operator",
                props.index, props.name[0] ? " (" : "", props.name, props.name[0] ? ")" : "",
                props.major, props.minor, architectures());
  CUTFUSE_CHECK(props.sm_count >= 1, Code::kInvalidValue,
                "CUDA device %d has %d multiprocessors; it must have at least 1, as query_device() "
                "says",
                props.index, props.sm_count);
  return {};
}

}  // namespace cutfuse
