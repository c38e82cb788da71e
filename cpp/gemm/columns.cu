/// \file
/// A program's leading affine steps, folded once for all tiles.
#include "core/launch.h"
#include "gemm/launcher.h"
#include "gemm/stage.cuh"

namespace cutfuse::gemm {
namespace {

constexpr int kBlock = 128;

__global__ void __launch_bounds__(kBlock)
    fold_kernel(const __grid_constant__ EpilogueArguments arguments, int64_t columns,
                float2* folded) {
  wait_for_previous_kernels();
  const int64_t column = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  const MomentExchange& exchange = arguments.exchange;
  if (column < exchange.clears) exchange.arrivals[column] = 0;
  if (column >= columns) return;
  folded[column] = fold_column(arguments, [&](int operand) {
    const float value = load_column(arguments.program.operands[operand], column);
    return operand == kVarOperand && arguments.normalises ? normaliser(arguments, value, column)
                                                          : value;
  });
}

}  // namespace

Status fold_columns(const EpilogueArguments& arguments, int64_t columns, float2* folded,
                    void* stream) noexcept {
  const auto blocks = static_cast<unsigned>((columns + kBlock - 1) / kBlock);
  return cutfuse::launch(fold_kernel, blocks, kBlock, 0, stream, arguments, columns, folded);
}

}  // namespace cutfuse::gemm
