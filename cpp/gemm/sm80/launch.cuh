/// \file
/// Policy -> kernel -> parameters -> launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "core/launch.h"
#include "core/once_ok.h"
#include "core/status.h"
#include "device/copies.cuh"
#include "gemm/launcher.h"
#include "gemm/sm80/epilogue.cuh"
#include "gemm/sm80/mainloop.cuh"
#include "gemm/sm80/shape.h"

namespace cutfuse::gemm::sm80 {

struct Params {
  Operands operands;
  TileOrder order;
  EpilogueArguments epilogue;
};

/// A block per tile and part of K.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    gemm_kernel(const __grid_constant__ Params params) {
  unsigned char* const shared = dynamic_shared();
  wait_for_previous_kernels();
  const Tile tile = tile_of(params.order, static_cast<int32_t>(blockIdx.x));
  const int part = static_cast<int>(blockIdx.z);
  float v[Shape::kSize];
  run_mainloop<Shape>(params.operands, tile, part, shared, v);
  run_epilogue<Shape>(params.epilogue, params.operands, tile, params.order.tiles_n, part, shared,
                      v);
}

template <class Shape>
class Sm80Gemm final : public Launcher {
 public:
  Sm80Gemm(const GemmProblem& problem, const GemmPolicy& policy, const OperandLayout& layout)
      : parts_(policy.split_k) {
    const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    constexpr int64_t kBytes = 2;
    operands_.m = static_cast<int32_t>(problem.m);
    operands_.n = static_cast<int32_t>(problem.n);
    operands_.k = static_cast<int32_t>(problem.k);
    const Images& images = layout.images;
    constexpr bool kImages = Shape::kSource == Source::kImages;
    operands_.images = images;
    operands_.a_leading = (kImages ? images.pixel_stride : layout.a_leading) * kBytes;
    operands_.b_leading = layout.b_leading * kBytes;
    const int64_t pixels = int64_t(images.count) * images.height * images.width;
    operands_.a_plane = (kImages ? pixels : problem.m) * operands_.a_leading;
    operands_.b_plane = problem.n * operands_.b_leading;
    operands_.part_tiles =
        static_cast<int32_t>(ceil_div(ceil_div(problem.k, Shape::kTileK), parts_));
    order_.tiles_m = static_cast<int32_t>(ceil_div(problem.m, Shape::kTileM));
    order_.tiles_n = static_cast<int32_t>(ceil_div(problem.n, Shape::kTileN));
    order_.along_n = policy.raster == Raster::kAlongN;
    order_.swizzle = std::min(policy.swizzle, order_.along_n ? order_.tiles_m : order_.tiles_n);
  }

  Status launch(const GemmCall& call, void* stream) noexcept override {
    if (Status status = prepared_.run([&] { return prepare(); }); !status.ok()) return status;
    Params params{operands_, order_, call.epilogue};
    params.operands.a = static_cast<const char*>(call.a_planes);
    params.operands.b = static_cast<const char*>(call.b_planes);
    params.operands.promotion = call.promotion;
    params.operands.promotion2 = 2.f * call.promotion - 1.f;
    const dim3 grid(static_cast<unsigned>(order_.tiles_m) * static_cast<unsigned>(order_.tiles_n),
                    1, static_cast<unsigned>(parts_));
    return cutfuse::launch(gemm_kernel<Shape>, grid, Shape::kThreads, Shape::kSharedBytes, stream,
                           params);
  }

 private:
  Operands operands_;
  TileOrder order_;
  int32_t parts_;
  OnceOk prepared_;

  Status prepare() const noexcept {
    const int64_t tiles = int64_t(order_.tiles_m) * order_.tiles_n;
    CUTFUSE_CHECK(tiles < int64_t(1) << 31, Code::kNotSupported,
                  "%lld output tiles of %dx%d; a launch has at most 2^31 - 1, split the batch",
                  static_cast<long long>(tiles), Shape::kTileM, Shape::kTileN);
    CUTFUSE_CUDA(cudaFuncSetAttribute(
        gemm_kernel<Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes));
    return {};
  }
};

template <class Shape>
Instance make_instance() {
  return {80,
          Shape::kElement,
          Shape::kTileM,
          Shape::kTileN,
          1,
          Shape::kPromoteK,
          [](const GemmProblem& problem, const GemmPolicy& policy, const OperandLayout& layout,
             const DeviceProps&) {
            return std::unique_ptr<Launcher>(new Sm80Gemm<Shape>(problem, policy, layout));
          },
          Shape::kSource};
}

}  // namespace cutfuse::gemm::sm80
