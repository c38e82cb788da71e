// The kernels that are emulated: the smallest tile of each kind.
#include "conv/shift/params.h"
#include "gemm/sm80/launch.cuh"

namespace cutfuse {

const gemm::Instance* gemm::instances(int32_t* count) noexcept {
  using gemm::sm80::make_instance;
  using gemm::sm80::Shape;
  constexpr auto kImages = Source::kImages;
  static const Instance table[] = {
      make_instance<Shape<DType::kFloat16, 64, 64, 32, 32, 32, 3, 32>>(),
      make_instance<Shape<DType::kFloat16, 64, 64, 32, 32, 32, 3, 16>>(),
      make_instance<Shape<DType::kFloat16, 64, 64, 32, 32, 64, 3, 0>>(),
      make_instance<Shape<DType::kBFloat16, 64, 64, 32, 32, 64, 3, 0>>(),
      make_instance<Shape<DType::kFloat16, 64, 64, 32, 32, 32, 3, 32, kImages>>(),
      make_instance<Shape<DType::kFloat16, 64, 64, 32, 32, 32, 3, 16, kImages>>(),
      make_instance<Shape<DType::kFloat16, 64, 64, 32, 32, 64, 3, 0, kImages>>(),
      make_instance<Shape<DType::kBFloat16, 64, 64, 32, 32, 64, 3, 0, kImages>>(),
  };
  *count = static_cast<int32_t>(sizeof(table) / sizeof(table[0]));
  return table;
}

const conv::shift::Instance* conv::shift::instances(int32_t* count) noexcept {
  *count = 0;
  return nullptr;
}

}  // namespace cutfuse
