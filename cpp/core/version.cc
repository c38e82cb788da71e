#include "cutfuse/version.h"

#include <cuda_runtime_api.h>

#include <cstdio>

#include "core/build.h"

namespace cutfuse {
namespace {

struct BuildInfo {
  char text[160] = {};

  BuildInfo() noexcept {
    std::snprintf(text, sizeof(text), "nvcc %d.%d, CUTLASS %s, %s", CUDART_VERSION / 1000,
                  CUDART_VERSION % 1000 / 10, CUTFUSE_CUTLASS_VERSION, CUTFUSE_ARCHITECTURES);
  }
};

}  // namespace

int32_t abi_version() noexcept { return kAbiVersion; }

const char* version() noexcept { return CUTFUSE_VERSION; }

const char* build_info() noexcept {
  static const BuildInfo info;
  return info.text;
}

const char* architectures() noexcept { return CUTFUSE_ARCHITECTURES; }

}  // namespace cutfuse
