// The kernels that are emulated: the smallest tile of each kind.
#include "registry.h"

#include "gemm/sm80/launch.cuh"

namespace cutfuse {

const gemm::Instance* gemm::instances(int32_t* count) noexcept {
  using gemm::sm80::make_instance;
  using gemm::sm80::Shape;
  constexpr auto kImages = Source::kImages;
  static const std::vector<Instance> table = [] {
    std::vector<Instance> all = {
        make_instance<Shape<DType::kFloat16, 64, 64, 32, 32, 32, 3, 32>>(),
        make_instance<Shape<DType::kFloat16, 64, 64, 32, 32, 32, 3, 16>>(),
        make_instance<Shape<DType::kFloat16, 64, 64, 32, 32, 64, 3, 0>>(),
        make_instance<Shape<DType::kBFloat16, 64, 64, 32, 32, 64, 3, 0>>(),
        make_instance<Shape<DType::kFloat16, 64, 64, 32, 32, 32, 3, 32, kImages>>(),
        make_instance<Shape<DType::kFloat16, 64, 64, 32, 32, 32, 3, 16, kImages>>(),
        make_instance<Shape<DType::kFloat16, 64, 64, 32, 32, 64, 3, 0, kImages>>(),
        make_instance<Shape<DType::kBFloat16, 64, 64, 32, 32, 64, 3, 0, kImages>>(),
    };
    for (const auto& more :
         {emulated_kernels::gemms_of_matrices(), emulated_kernels::gemms_of_images(),
          emulated_kernels::gemms_of_planes()}) {
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  }();
  *count = static_cast<int32_t>(table.size());
  return table.data();
}

const conv::shift::Instance* conv::shift::instances(int32_t* count) noexcept {
  static const std::vector<Instance> table = emulated_kernels::shifts();
  *count = static_cast<int32_t>(table.size());
  return table.data();
}

const conv::patches::Instance* conv::patches::instances(int32_t* count) noexcept {
  static const std::vector<Instance> table = emulated_kernels::patches();
  *count = static_cast<int32_t>(table.size());
  return table.data();
}

}  // namespace cutfuse
