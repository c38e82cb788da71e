/// \file
/// Expected times of a problem here and in PyTorch, which decide who runs it.
#include "fused/estimate.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <new>

#include "core/status.h"
#include "fused/plan.h"
#include "simt/multiply.h"
#include "skinny/multiply.h"

namespace cutfuse {
namespace {

// Microseconds and bytes or operations per microsecond, measured on an H200 over log-uniform sizes
// of 1 ... 16384 with bias and gelu, by graph replay. PyTorch's figures are its best ones, so that
// a problem is taken only where it is faster against those.
using fused::kBandwidth;
using fused::kLaunch;

double ceil_div(double a, double b) {
  return static_cast<double>((int64_t(a) + int64_t(b) - 1) / int64_t(b));
}

/// Of padded copies that are made before, where 16-bit rows are not multiples of 16 bytes.
double copying(const GemmProblem& problem) {
  const auto [m, n, k, precision, dtype] = problem;
  if (dtype == DType::kFloat32 || k % 8 == 0) return 0.0;
  return 2 * kLaunch + 2.0 * double(size_of(dtype)) * double(m + n) * double(k) / kBandwidth;
}

/// Of the two launches that take few rows.
double skinnys(const FusedProblem& problem, const DeviceProps& device) {
  const auto [m, n, k, precision, dtype] = problem.gemm;
  const auto [parts, steps] = skinny::select_parts(m, n, k, device.sm_count);
  const double out = double(m) * double(n);
  const double bytes = double(m + n) * double(k) * double(size_of(dtype));
  const double step = std::min(m, n) <= 8    ? 1.2
                      : k % 4 == 0           ? 1.4
                      : std::min(m, n) <= 12 ? 2.4
                                             : 1.7;
  return 6.0 + copying(problem.gemm) + std::max(bytes / 3.4e6, step * steps) +
         out * (8.0 * parts + double(size_of(dtype))) / kBandwidth;
}

/// Of one launch without tensor cores. Fitted to 241 sizes in fp32 and bf16, of which it took 0.7
/// to 1.3 of what is expected then; with a tenth more, none of the 101 that are taken took longer
/// than 1.04 of PyTorch's time. Clusters were fitted to 46 sizes in fp32, K from 200 to 16000: the
/// selected ones took 0.73 to 1.13 of what is expected without that tenth, 3 % more than the best.
double simts(const FusedProblem& problem, const GemmPolicy& policy, const DeviceProps& device) {
  struct Cost {
    double tile, k;
  };
  constexpr Cost kCosts[] = {
      {1.2, 0.045}, {0.7, 0.0165}, {0.92, 0.0145}, {0.77, 0.0115}, {0.66, 0.0095}};
  static_assert(std::size(kCosts) == std::size(simt::kTiles));
  const auto [m, n, k, precision, dtype] = problem.gemm;
  const int32_t index = std::max(fused::simt_tile(policy), 0);
  const simt::Tile& tile = simt::kTiles[index];
  const Cost& cost = kCosts[index];
  double steps = 0.55;
  for (int32_t i = 0; i < problem.program.count; ++i) {
    steps += problem.program.steps[i].op >= Op::kSigmoid ? 0.35 : 0.1;
  }
  if (n % 2 != 0) steps *= 1.3;  // stores of one value
  const double terms = double(k) * (k % 4 == 0 ? 1.0 : 1.1) / policy.cluster_m;
  const double tiles = policy.cluster_m * ceil_div(double(m), tile.m) * ceil_div(double(n), tile.n);
  // The groups of 16 to 18 SMs, which larger clusters do not leave, hold whole ones.
  const double room = policy.cluster_m == 8 ? 0.85 : policy.cluster_m == 4 ? 0.91 : 1.0;
  double time = ceil_div(tiles, room * device.sm_count) * (cost.tile * steps + cost.k * terms);
  if (policy.cluster_m > 1) time += 1.2;
  // Blocks of one group hide each other's latency, four of them when this was fitted.
  if (tile.groups == 1) {
    time = std::max(time, ceil_div(tiles, 4.0 * device.sm_count) * (2.3 + 0.067 * double(k)));
  }
  const double bytes = (double(m + n) * double(k) + double(m) * double(n)) * double(size_of(dtype));
  return 1.1 * (2.6 + std::max(time, bytes / kBandwidth));
}

double torchs(const FusedProblem& problem) {
  const auto [m, n, k, precision, dtype] = problem.gemm;
  const auto size = static_cast<double>(size_of(dtype));
  const double work = 2.0 * double(m) * double(n) * double(k);
  const double out = double(m) * double(n);
  // cuBLAS's 16-bit and TF32 kernels need rows 16 bytes apart to be fast.
  const int64_t alignment = 16 / size_of(dtype);
  const bool aligned = k % alignment == 0 && n % alignment == 0;
  const bool wide = plane_count(problem.gemm) == 2;
  const int64_t rows = std::min(m, n);
  const double rate = wide && rows <= 128        ? 35e6
                      : wide                     ? 52e6
                      : !aligned                 ? 150e6
                      : dtype == DType::kFloat32 ? 380e6
                                                 : 720e6;
  const double bytes = (double(m) * double(k) + double(n) * double(k) + out) * size;
  // Few blocks follow K one after the other; of a vector cuBLAS has kernels that share it out.
  const double per_k = rows == 1                  ? 0.0
                       : dtype != DType::kFloat32 ? 0.0003
                       : !wide                    ? 0.0005
                                                  : 0.0015;
  double contraction = std::max({work / rate, bytes / kBandwidth, per_k * double(k)});
  // Of up to 16 rows, or one column, cuBLAS has kernels for those; of others in fp32 it follows K,
  // or shares it out and adds the parts. The fastest of 60 sizes, K from 64 on, had this.
  if (wide && m > 16 && n > 1) {
    contraction = std::max(contraction, std::min(0.008 * double(k), 12.0 + 0.0038 * double(k)));
  }
  // Of 16 bits it has few kernels for rows that are no multiples of 16 bytes, and for odd ones none
  // that shares K out: the fastest of 21 sizes, K from 201 to 9516, had this, in odd ones up to K
  // of 3643.
  if (dtype != DType::kFloat32 && k % 8 != 0 && k > 200 && m > 16 && n > 1) {
    const double least =
        k % 2 != 0 ? std::clamp(0.0048 * double(k), 4.5, 12.0) : std::min(0.0045 * double(k), 5.0);
    contraction = std::max(contraction, least);
  }
  if (wide && rows > 1 && rows <= skinny::kMostRows) {
    // In fp32 few rows do not reach the memory's bandwidth, and less so where blocks are few.
    const double many = double(std::max(m, n));
    const double filled = std::min(1.0, ceil_div(many, 128.0) / 128.0);
    const double element = rows <= 4 ? 1.5e-6 : 2.0e-6 * std::pow(filled, -0.3);
    contraction = std::max(contraction, element * many * double(k));
  }
  // The first step is usually a bias, which addmm takes along.
  double passes = std::max(problem.program.count - 1, 0) + problem.after.count;
  if (problem.tail != Tail::kNone) passes += problem.tail == Tail::kBatchNormTrain ? 2.0 : 1.0;
  // Of one or two rows it launches less, and of single products more.
  const double launches = m <= 2 ? 2.3 : k == 1 ? 5.0 : 3.0;
  return launches + contraction + passes * (1.5 + 2.0 * out * size / kBandwidth);
}

/// Whether the kernel rounds the fp32 weight of a layer that it turns over.
bool rounds_weight(const GemmPolicy& policy) {
  return policy.source == Source::kTurned && policy.element == DType::kFloat32;
}

}  // namespace

double fused::contraction_time(const GemmProblem& problem, const GemmPolicy& policy) {
  // Tiles of 64 columns were not fitted: ResNet-50's three in bf16 took 0.65 to 0.70 of the sum.
  const double k_tile = plane_count(problem) == 2
                            ? (policy.promote_k == 16 ? 1.9 : 1.1 * policy.tile_n / 128.0)
                        : rounds_weight(policy) ? 0.88
                        : policy.tile_n == 256  ? 0.62
                        : policy.tile_n == 64   ? 0.3
                                                : 0.42;
  return ceil_div(ceil_div(double(problem.k), 64.0), policy.split_k) * k_tile;
}

double fused::expected(const FusedProblem& problem, const Links& links, const DeviceProps& device) {
  return expected(problem, links, fused::select_policy(problem, links, device), device);
}

double fused::expected(const FusedProblem& problem, const Links& links, const GemmPolicy& policy,
                       const DeviceProps& device) {
  const bool turned = rounds_weight(policy);
  if (policy.arch == kSimt) return simts(problem, policy, device);
  if (policy.arch == kSkinny) return skinnys(problem, device);
  const auto [m, n, k, precision, dtype] = problem.gemm;
  const int32_t planes = plane_count(problem.gemm);
  double time = 6.0 + copying(problem.gemm);
  if (planes > 0 && !links.reads_planes && !links.reads_images) {
    const double split =
        double(m) * double(k) + (problem.weight_planes || turned ? 0.0 : double(n) * double(k));
    time += kLaunch + split * (4.0 + 2.0 * planes) / kBandwidth;
  }
  const bool large = policy.tile_n == 256;
  // The result leaves by the copy engine only if its rows are 16 bytes apart, or multiples of that.
  double epilogue = n * size_of(dtype) % 16 == 0 ? 2.5 : n % 2 == 0 ? 5.0 : 10.0;
  for (int32_t i = 0; i < problem.program.count; ++i) {
    epilogue += problem.program.steps[i].op >= Op::kSigmoid ? 3.0 : 0.5;
  }
  const bool wide = dtype == DType::kFloat32;
  if (links.reads_images) time += large ? (wide ? 18.0 : 2.0) : (wide ? 6.0 : 0.0);
  if (links.reads_images && links.images.planes_out) {
    epilogue += wide ? 1.5 : 2.5;
  } else if (large && !turned) {
    epilogue *= 2.0;
  }
  const GemmProblem product = fused::multiplied(problem.gemm, policy);
  const double tiles =
      ceil_div(double(product.m), policy.tile_m) * ceil_div(double(product.n), policy.tile_n);
  const double waves = ceil_div(tiles * policy.split_k, device.sm_count);
  time += waves * (fused::contraction_time(problem.gemm, policy) + epilogue);
  if (turned) time += 0.12 * ceil_div(double(k), 64.0);  // fitted to 42 sizes (H100)
  if (policy.trailing_blocks != 0) time -= fused::trailing_gain(problem, policy, device);
  const double out = double(m) * double(n);
  if (policy.split_k > 1) time += kLaunch + out * 4.0 * (policy.split_k + 1) / kBandwidth;
  if (fused::exchanging_blocks(problem, policy, device) != 0) {
    time += (policy.trailing_blocks != 0 ? 2 : 1) * kLaunch + 2.5 * waves;
  } else if (problem.tail == Tail::kBatchNormTrain) {
    time += 2 * kLaunch + 2.0 * out * double(size_of(dtype)) / kBandwidth;
  }
  if (problem.tail == Tail::kLogSumExp) time += kLaunch;
  return time;
}

Status why_slower(const FusedProblem& problem, const DeviceProps& device) noexcept try {
  if (!why_not(problem, device).ok()) return {};
  const double here = fused::expected(problem, {}, device);
  const double there = torchs(problem);
  if (here <= there) {
    return {};
  }
  return error(Code::kNotSupported,
               "%s: PyTorch's kernels are expected to be faster (%.0f against %.0f us)",
               to_string(problem.gemm).c_str(), there, here);
} catch (const std::bad_alloc&) {
  return error(Code::kOutOfMemory, "no host memory to say why");
}

}  // namespace cutfuse
