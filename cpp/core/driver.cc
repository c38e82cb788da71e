#include "core/driver.h"

#include <cuda_runtime_api.h>

#include "core/status.h"

namespace cutfuse {
namespace {

/// The driver's function of that name since CUDA 12.0, or null.
void* entry_point(const char* name) noexcept {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t result =
      cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found);
  return result == cudaSuccess && found == cudaDriverEntryPointSuccess ? entry : nullptr;
}

Status no_entry_point(const char* name) noexcept {
  return error(
      Code::kCuda,
      "the CUDA driver has no %s; a driver for CUDA 13.0 or newer (580 or later) is needed", name);
}

constexpr char kEncode[] = "cuTensorMapEncodeTiled";

decltype(&cuTensorMapEncodeTiled) encoder() noexcept {
  static const auto encode =
      reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry_point(kEncode));
  return encode;
}

}  // namespace

Status replace_tensor_map_address(CUtensorMap* map, const void* address) noexcept {
  using Replace = CUresult (*)(CUtensorMap*, void*);
  static const auto replace = reinterpret_cast<Replace>(entry_point("cuTensorMapReplaceAddress"));
  if (replace == nullptr) {
    return no_entry_point("cuTensorMapReplaceAddress");
  }
  const CUresult result = replace(map, const_cast<void*>(address));
  if (result != CUDA_SUCCESS) {
    return error(Code::kCuda, "cuTensorMapReplaceAddress refused address %p (driver error %d)",
                 address, static_cast<int>(result));
  }
  return {};
}

bool can_encode(const TensorBoxes& boxes) noexcept {
  if (boxes.strides[0] != 1) return false;
  if (reinterpret_cast<uintptr_t>(boxes.data) % 16 != 0) return false;
  for (size_t i = 0; i < boxes.sizes.size(); ++i) {
    if (boxes.box[i] > 256 || boxes.sizes[i] <= 0) return false;
    const int64_t stride = boxes.strides[i];
    if (i > 0 && boxes.sizes[i] > 1 && (stride <= 0 || stride % 4 != 0)) return false;
    if (stride >= (int64_t(1) << 37)) return false;
  }
  return true;
}

Status encode_boxes(const TensorBoxes& boxes, CUtensorMap* map) noexcept {
  const auto encode = encoder();
  if (encode == nullptr) return no_entry_point(kEncode);
  cuuint64_t sizes[5];
  cuuint64_t strides[4];
  cuuint32_t box[5];
  const cuuint32_t steps[] = {1, 1, 1, 1, 1};
  for (size_t i = 0; i < 5; ++i) {
    sizes[i] = static_cast<cuuint64_t>(boxes.sizes[i]);
    box[i] = static_cast<cuuint32_t>(boxes.box[i]);
    // A dimension of one is never stepped along.
    if (i > 0) {
      strides[i - 1] = boxes.sizes[i] > 1 ? static_cast<cuuint64_t>(boxes.strides[i]) * 4 : 16;
    }
  }
  const CUresult result = encode(
      map, boxes.tf32 ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 5,
      const_cast<void*>(boxes.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      !boxes.swizzled          ? CU_TENSOR_MAP_SWIZZLE_NONE
      : boxes.box[0] * 4 == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                               : CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  CUTFUSE_CHECK(result == CUDA_SUCCESS, Code::kCuda,
                "cuTensorMapEncodeTiled refused an image of %lld x %lld (driver error %d)",
                static_cast<long long>(boxes.sizes[0]), static_cast<long long>(boxes.sizes[1]),
                static_cast<int>(result));
  return {};
}

Status encode_images(const ImageBoxes& boxes, CUtensorMap* map) noexcept {
  constexpr char kName[] = "cuTensorMapEncodeIm2col";
  static const auto encode =
      reinterpret_cast<decltype(&cuTensorMapEncodeIm2col)>(entry_point(kName));
  if (encode == nullptr) return no_entry_point(kName);
  constexpr cuuint32_t kBoxChannels = 64;
  const auto number = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const cuuint64_t sizes[] = {number(boxes.channels), number(boxes.width), number(boxes.height),
                              number(boxes.images)};
  const cuuint64_t pixel = number(boxes.pixel_stride * size_of(boxes.dtype));
  const cuuint64_t strides[] = {pixel, pixel * sizes[1], pixel * sizes[1] * sizes[2]};
  const int lower[] = {boxes.lower_w, boxes.lower_h};
  const int upper[] = {boxes.upper_w, boxes.upper_h};
  const cuuint32_t steps[] = {1, static_cast<cuuint32_t>(boxes.stride_w),
                              static_cast<cuuint32_t>(boxes.stride_h), 1};
  const CUtensorMapDataType type = boxes.dtype == DType::kBFloat16
                                       ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                       : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult result =
      encode(map, type, 4, const_cast<void*>(boxes.data), sizes, strides, lower, upper,
             kBoxChannels, static_cast<cuuint32_t>(boxes.box_pixels), steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  CUTFUSE_CHECK(result == CUDA_SUCCESS, Code::kCuda,
                "%s refused %lld images of %lld x %lld x %lld at %p (driver error %d)", kName,
                static_cast<long long>(boxes.images), static_cast<long long>(boxes.height),
                static_cast<long long>(boxes.width), static_cast<long long>(boxes.channels),
                boxes.data, static_cast<int>(result));
  return {};
}

Status encode_output_map(const Matrix& out, int64_t rows, int64_t columns, int64_t count,
                         int64_t plane_stride, int box_rows, CUtensorMap* map) noexcept {
  const auto encode = encoder();
  if (encode == nullptr) return no_entry_point(kEncode);
  const auto bytes = static_cast<cuuint64_t>(size_of(out.dtype));
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(count)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(out.row_stride) * bytes,
                                static_cast<cuuint64_t>(plane_stride) * bytes};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(64 / bytes), static_cast<cuuint32_t>(box_rows),
                            1};
  const cuuint32_t steps[] = {1, 1, 1};
  const CUtensorMapDataType type = out.dtype == DType::kFloat32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : out.dtype == DType::kFloat16
                                       ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                       : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result =
      encode(map, type, 3, out.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return error(Code::kCuda,
                 "cuTensorMapEncodeTiled refused a %lld x %lld output with row stride %lld at %p "
                 "(driver error %d)",
                 static_cast<long long>(rows), static_cast<long long>(columns),
                 static_cast<long long>(out.row_stride), static_cast<const void*>(out.data),
                 static_cast<int>(result));
  }
  return {};
}

}  // namespace cutfuse
