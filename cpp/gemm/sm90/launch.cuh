/// \file
/// Policy -> CUTLASS kernel type -> parameters -> launch.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <cutlass/device_kernel.h>
#include <algorithm>
#include <cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_cooperative.hpp>
#include <mutex>
#include <type_traits>

#include "core/driver.h"
#include "core/once_ok.h"
#include "core/status.h"
#include "gemm/launcher.h"
#include "gemm/sm90/collective.cuh"
#include "gemm/sm90/images.cuh"
#include "gemm/sm90/mainloop.cuh"
#include "gemm/sm90/nchw_mainloop.cuh"
#include "gemm/sm90/nchw_split_mainloop.cuh"
#include "gemm/sm90/turned_mainloop.cuh"

namespace cutfuse::gemm::sm90 {

template <class Element>
inline constexpr DType kDTypeOf = std::is_same_v<Element, float>             ? DType::kFloat32
                                  : std::is_same_v<Element, cutlass::half_t> ? DType::kFloat16
                                                                             : DType::kBFloat16;

template <class Element, int kTileM, int kTileN, int kClusterM, int kStages, int kPromoteK,
          Source kSource>
class Sm90Gemm final : public Launcher {
  static constexpr bool kTurned = kSource == Source::kTurned;
  static constexpr bool kRounded = kTurned && std::is_same_v<Element, float>;  // on its way
  using Stored = std::conditional_t<kRounded, cutlass::half_t, Element>;       // in shared memory
  using TileShape =
      cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>, cute::Int<2 * kTileK / sizeof(Stored)>>;
  using ClusterShape = cute::Shape<cute::Int<kClusterM>, cute::_1, cute::_1>;
  static constexpr int kPlanes = kPromoteK == 0 ? 1 : 2;
  static constexpr bool kNchw = kSource == Source::kNchw;
  static constexpr bool kImages = kSource == Source::kImages || kNchw;
  static constexpr bool kTf32 = std::is_same_v<Stored, float>;
  static constexpr bool kOwnMap = kImages || kRounded;  // of A
  static_assert(!kTurned || kPlanes == 1);
  static_assert((kNchw || !kTf32) && (!kNchw || kClusterM == 1));
  using MatrixMainloop =
      std::conditional_t<kPlanes == 1, PlainMainloop<Stored, TileShape, ClusterShape, kStages, 1>,
                         SplitMainloop<TileShape, ClusterShape, kStages, kPromoteK>>;
  using PlanesMainloop = std::conditional_t<kTf32, NchwMainloop<TileShape, kStages>,
                                            NchwSplitMainloop<TileShape, kStages, kPromoteK>>;
  using Mainloop = std::conditional_t<
      kNchw, PlanesMainloop,
      std::conditional_t<
          kRounded, TurnedMainloop<TileShape, ClusterShape, kStages>,
          std::conditional_t<kImages, ImageMainloop<MatrixMainloop>, MatrixMainloop>>>;
  static constexpr int kRowStep = kRounded ? 1 : kTf32 ? 4 : 8;
  using Epilogue = EpilogueCollective<TileShape, kSource, kRowStep, kDTypeOf<Element>>;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop,
                                                      Epilogue, cutlass::gemm::PersistentScheduler>;
  using Params = typename Kernel::Params;

  static constexpr int64_t kSharedBytes = Kernel::SharedStorageSize;
  static_assert(kSharedBytes <= 232448, "shared memory of one sm_90 block");

 public:
  Sm90Gemm(const GemmProblem& problem, const GemmPolicy& policy, const OperandLayout& layout,
           const DeviceProps& device)
      : problem_(problem), policy_(policy), layout_(layout), device_(device) {}

  Status launch(const GemmCall& call, void* stream) noexcept override {
    // The first call encodes the tensor maps and lifts the shared-memory limit; later calls copy
    // the parameters and patch addresses (encoding anew would cost 19 us a call).
    if (Status status = prepared_.run([&] { return prepare(call); }); !status.ok()) return status;
    Params params = params_;
    static_cast<EpilogueArguments&>(params.epilogue) = call.epilogue;
    params.mainloop.waits = !call.follows_fold;
    params.epilogue.arriving = call.arriving;
    if constexpr (!kImages) params.mainloop.arriving = call.arriving;
    params.mainloop.promotion = call.promotion;
    params.mainloop.promotion2 = 2.f * call.promotion - 1.f;
    if (Status status =
            replace_address(params.mainloop.tma_load_a.get_tma_descriptor(), call.a_planes);
        !status.ok())
      return status;
    if constexpr (kRounded) {
      // One that was encoded for rows as far apart.
      if (call.epilogue.a.row_stride != row_stride_) {
        auto* map =
            const_cast<cute::TmaDescriptor*>(params.mainloop.tma_load_a.get_tma_descriptor());
        if (Status status = encode(call, map); !status.ok()) return status;
      }
    }
    if (Status status =
            replace_address(params.mainloop.tma_load_b.get_tma_descriptor(), call.b_planes);
        !status.ok())
      return status;
    const Matrix& out = call.epilogue.out;
    if constexpr (kTurned && !kRounded) {
      // What plans turn over may be mapped.
      if (out.row_stride != out_.row_stride) {
        if (Status status = encode_output(out, 1, &params.epilogue.out_map); !status.ok()) {
          return status;
        }
      }
    } else {
      params.epilogue.out_mapped &= out.row_stride == out_.row_stride && out.dtype == out_.dtype &&
                                    reinterpret_cast<uintptr_t>(out.data) % 16 == 0;
    }
    if (params.epilogue.out_mapped) {
      if (Status status = replace_tensor_map_address(&params.epilogue.out_map, out.data);
          !status.ok()) {
        return status;
      }
    }
    const EpilogueArguments& epilogue = call.epilogue;
    const bool boxed = !kNchw && params.epilogue.out_mapped && epilogue.row_partials == nullptr;
    // What reads results before they leave needs all of the program before.
    if ((boxed || kTurned) && epilogue.partials == nullptr) {
      params.epilogue.ending = ending_of(epilogue.program);
      if (boxed && epilogue.out_planes == 0) {
        params.epilogue.only_boxes = true;
        params.epilogue.leaving = leaving(epilogue, &params.epilogue);
      }
    }
    params.epilogue.boxes_and_moments = boxed && out.dtype != DType::kFloat32 &&
                                        epilogue.partials != nullptr &&
                                        epilogue.exchange.arrivals == nullptr;

    if (call.blocks != 0) params.hw_info.sm_count = call.blocks;
    cudaLaunchAttribute attributes[3]{cluster_attribute()};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    // Blocks that wait for each other must all be resident.
    attributes[2].id = cudaLaunchAttributeCooperative;
    attributes[2].val.cooperative = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = Kernel::get_grid_shape(params);
    config.blockDim = Kernel::get_block_shape();
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    const MomentExchange& exchange = call.epilogue.exchange;
    config.numAttrs = exchange.arrivals != nullptr && exchange.gathering == nullptr ? 3 : 2;
    CUTFUSE_CUDA(cudaLaunchKernelEx(&config, cutlass::device_kernel<Kernel>, params));
    return {};
  }

  int32_t resident_blocks() noexcept override {
    std::call_once(counted_once_, [&] {
      cudaLaunchAttribute attribute = cluster_attribute();
      cudaLaunchConfig_t config{};
      config.gridDim = device_.sm_count / kClusterM * kClusterM;
      config.blockDim = Kernel::get_block_shape();
      config.dynamicSmemBytes = kSharedBytes;
      config.attrs = &attribute;
      config.numAttrs = 1;
      int clusters = 0;
      if (allow_shared_bytes().ok() &&
          cudaOccupancyMaxActiveClusters(&clusters, cutlass::device_kernel<Kernel>, &config) ==
              cudaSuccess) {
        resident_blocks_ = clusters * kClusterM;
      } else {
        (void)cudaGetLastError();  // the next caller's error is not this one
      }
    });
    return resident_blocks_;
  }

 private:
  GemmProblem problem_;
  GemmPolicy policy_;
  OperandLayout layout_;
  DeviceProps device_;
  OnceOk prepared_;
  std::once_flag counted_once_;
  int32_t resident_blocks_ = 0;
  Params params_;
  Matrix out_;              // what out_map was encoded for
  int64_t row_stride_ = 0;  // and a turned layer's map of A

  static Leaving leaving(const EpilogueArguments& epilogue,
                         typename Epilogue::Params* params) noexcept {
    const DeviceProgram& program = epilogue.program;
    const int32_t affine = epilogue.affine_steps;
    if (program.count == affine) return Leaving::kFolded;
    if (params->ending.first == affine) return Leaving::kEnded;
    const bool bounded = program.count == affine + 1 &&
                         bounds_of(program.steps[affine], &params->lowest, &params->highest);
    return bounded ? Leaving::kBounded : Leaving::kNot;
  }

  static cudaLaunchAttribute cluster_attribute() {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = kClusterM;
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
    return attribute;
  }

  static Status allow_shared_bytes() noexcept {
    CUTFUSE_CUDA(cudaFuncSetAttribute(cutlass::device_kernel<Kernel>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(kSharedBytes)));
    return {};
  }

  Status prepare(const GemmCall& call) noexcept {
    if (Status status = allow_shared_bytes(); !status.ok()) return status;
    const int m = static_cast<int>(problem_.m);
    const int n = static_cast<int>(problem_.n);
    const int k = static_cast<int>(problem_.k);
    typename Kernel::Arguments args{};
    args.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    args.problem_shape = {m, n, Mainloop::kernel_k(k, policy_.split_k), policy_.split_k};
    args.mainloop.planes.ptr_B = static_cast<const Stored*>(call.b_planes);
    args.mainloop.planes.dB = {layout_.b_leading, cute::_1{}, problem_.n * layout_.b_leading};
    if constexpr (kOwnMap) {
      // A's map is put in place of this one.
      args.mainloop.planes.ptr_A = args.mainloop.planes.ptr_B;
      args.mainloop.planes.dA = args.mainloop.planes.dB;
      args.mainloop.m = n;
      if constexpr (kImages) args.mainloop.images = layout_.images;
    } else {
      args.mainloop.planes.ptr_A = static_cast<const Stored*>(call.a_planes);
      args.mainloop.planes.dA = {layout_.a_leading, cute::_1{}, problem_.m * layout_.a_leading};
      args.mainloop.m = m;
    }
    args.mainloop.n = n;
    args.mainloop.k = k;
    args.mainloop.parts = policy_.split_k;
    args.epilogue = call.epilogue;
    args.hw_info.device_id = device_.index;
    args.hw_info.sm_count = persistent_blocks(problem_, policy_, device_);
    args.scheduler.max_swizzle_size = policy_.swizzle;
    using Order = decltype(args.scheduler.raster_order);
    args.scheduler.raster_order = policy_.raster == Raster::kAlongN ? Order::AlongN : Order::AlongM;
    params_ = Kernel::to_underlying_arguments(args, nullptr);
    if constexpr (kOwnMap) {
      params_.epilogue.images = layout_.images;
      row_stride_ = call.epilogue.a.row_stride;
      auto* map =
          const_cast<cute::TmaDescriptor*>(params_.mainloop.tma_load_a.get_tma_descriptor());
      if (Status status = encode(call, map); !status.ok()) return status;
      if (kRounded || layout_.images.planes_out) return {};
    }
    out_ = call.epilogue.out;
    const int64_t alignment = 16 / size_of(out_.dtype);
    params_.epilogue.out_mapped = out_.data != nullptr && out_.row_stride % alignment == 0 &&
                                  reinterpret_cast<uintptr_t>(out_.data) % 16 == 0;
    if (params_.epilogue.out_mapped) {
      const int64_t count = std::max(policy_.split_k, call.epilogue.out_planes);
      return encode_output(out_, count, &params_.epilogue.out_map);
    }
    return {};
  }

  Status encode_output(const Matrix& out, int64_t count, CUtensorMap* map) const noexcept {
    const int64_t rows = kTurned ? problem_.n : problem_.m;
    const int64_t columns = kTurned ? problem_.m : problem_.n;
    return encode_output_map(out, rows, columns, count, rows * out.row_stride, 16, map);
  }

  /// A's map, of images or of a turned layer's rows.
  Status encode(const GemmCall& call, CUtensorMap* map) const noexcept {
    const Images& images = layout_.images;
    if constexpr (kRounded) {
      return encode_boxes(turned_boxes(call.epilogue.a, problem_.m, problem_.k, kTileM), map);
    } else if constexpr (kNchw) {
      return encode_boxes(pixel_boxes_of(images, call.a_planes, kTf32), map);
    } else {
      return encode_images(boxes_of(images, call.a_planes, kPlanes, policy_.element, kTileM), map);
    }
  }

  /// `map` is a member of a Params on the caller's stack, const only by its accessor.
  static Status replace_address(const cute::TmaDescriptor* map, const void* address) noexcept {
    return replace_tensor_map_address(const_cast<cute::TmaDescriptor*>(map), address);
  }
};

template <class Element, int kTileM, int kTileN, int kClusterM, int kStages, int kPromoteK,
          Source kSource = Source::kMatrix>
Instance make_instance() {
  return {90,
          kDTypeOf<Element>,
          kTileM,
          kTileN,
          kClusterM,
          kPromoteK,
          [](const GemmProblem& problem, const GemmPolicy& policy, const OperandLayout& layout,
             const DeviceProps& device) {
            return std::unique_ptr<Launcher>(
                new Sm90Gemm<Element, kTileM, kTileN, kClusterM, kStages, kPromoteK, kSource>(
                    problem, policy, layout, device));
          },
          kSource};
}

}  // namespace cutfuse::gemm::sm90
