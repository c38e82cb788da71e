// What the driver makes of tensor maps, and refuses.
#include "maps.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <string>

namespace {

using emulated::TensorMap;

/// What both kinds of maps have in common; false if the driver would refuse it.
bool fill(CUtensorMap* to, CUtensorMapDataType type, cuuint32_t rank, void* address,
          const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* steps,
          CUtensorMapSwizzle swizzle, TensorMap* map) {
  *map = {};
  map->address = reinterpret_cast<uint64_t>(address);
  bool holds = map->address % 16 == 0 && rank >= 1 && rank <= 5;
  for (cuuint32_t d = 0; d < rank; ++d) {
    holds = holds && sizes[d] > 0 && sizes[d] < uint64_t(1) << 32 && steps[d] >= 1 && steps[d] <= 8;
    map->sizes[d] = uint32_t(sizes[d]);
    map->steps[d] = uint8_t(steps[d]);
    if (d == 0) continue;
    holds = holds && strides[d - 1] % 16 == 0 && strides[d - 1] < uint64_t(1) << 40;
    map->strides[d - 1] = strides[d - 1];
  }
  map->rank = uint8_t(rank);
  map->rounds = type == CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  map->element = map->rounds || type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  map->swizzle_mask = swizzle == CU_TENSOR_MAP_SWIZZLE_128B  ? 7
                      : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 3
                      : swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 1
                                                             : 0;
  return holds && reinterpret_cast<uintptr_t>(to) % 64 == 0;
}

/// Whether rows of a box are as long as a swizzle allows.
bool fits_swizzle(const TensorMap& map) {
  const uint32_t bytes = map.box[0] * map.element;
  return bytes % 16 == 0 && (map.swizzle_mask == 0 || bytes <= (map.swizzle_mask + 1u) * 16);
}

CUresult encode_tiled(CUtensorMap* to, CUtensorMapDataType type, cuuint32_t rank, void* address,
                      const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  TensorMap map;
  bool holds = fill(to, type, rank, address, sizes, strides, steps, swizzle, &map);
  for (cuuint32_t d = 0; d < rank; ++d) {
    holds = holds && box[d] >= 1 && box[d] <= 256;
    map.box[d] = uint16_t(box[d]);
  }
  if (!holds || !fits_swizzle(map)) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(to, &map, sizeof(map));
  return CUDA_SUCCESS;
}

CUresult encode_images(CUtensorMap* to, CUtensorMapDataType type, cuuint32_t rank, void* address,
                       const cuuint64_t* sizes, const cuuint64_t* strides, const int* lower,
                       const int* upper, cuuint32_t channels, cuuint32_t pixels,
                       const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  TensorMap map;
  bool holds = fill(to, type, rank, address, sizes, strides, steps, swizzle, &map);
  holds = holds && rank == 4 && channels <= 256 && pixels <= 1024;
  for (int d = 0; d < 2; ++d) {
    holds = holds && lower[d] >= -128 && lower[d] <= 127 && upper[d] >= -128 && upper[d] <= 127;
    map.lower[d] = int8_t(lower[d]);
    map.upper[d] = int8_t(upper[d]);
  }
  map.box[0] = uint16_t(channels);
  map.box[1] = uint16_t(pixels);
  map.images = 1;
  if (!holds || !fits_swizzle(map)) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(to, &map, sizeof(map));
  return CUDA_SUCCESS;
}

CUresult replace_address(CUtensorMap* map, void* address) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  reinterpret_cast<TensorMap*>(map)->address = reinterpret_cast<uint64_t>(address);
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned,
                                                        unsigned long long,
                                                        cudaDriverEntryPointQueryResult* found) {
  const std::string asked = name;
  *entry = asked == "cuTensorMapEncodeTiled"      ? reinterpret_cast<void*>(&encode_tiled)
           : asked == "cuTensorMapEncodeIm2col"   ? reinterpret_cast<void*>(&encode_images)
           : asked == "cuTensorMapReplaceAddress" ? reinterpret_cast<void*>(&replace_address)
                                                  : nullptr;
  *found = *entry != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
