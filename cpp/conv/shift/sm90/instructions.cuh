/// \file
/// The kernel's wgmma: 64 output channels x kN pixels x 16, both operands in shared memory without
/// a swizzle, so that a start may lie at any multiple of 16 bytes.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/mma_sm90_gmma_ext.hpp>
#include <cute/arch/util.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>

namespace cutfuse::conv::shift::sm90 {

/// Distance between eight rows, and eight pixels.
inline constexpr uint32_t kCoreBytes = 128;

/// Low word of a descriptor; the high one is the distance of the next eight rows or pixels.
/// `half`: distance between the two halves of K.
CUTLASS_DEVICE uint32_t operand_word(uint32_t address, uint32_t half) {
  return (address >> 4) | (half >> 4 << 16);
}
CUTLASS_DEVICE uint64_t descriptor(uint32_t word) { return uint64_t(kCoreBytes >> 4) << 32 | word; }

template <int kN, class Element>
struct Instruction {
  using Op = decltype(cute::SM90::GMMA::ss_op_selector<
                      Element, Element, float, cute::Shape<cute::_64, cute::Int<kN>, cute::_16>,
                      cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K>());

  /// d = a * b (+ d).
  CUTLASS_DEVICE static void run(float (&d)[kN / 2], uint32_t a, uint32_t b, bool add) {
    const uint64_t descriptor_a = descriptor(a);
    const uint64_t descriptor_b = descriptor(b);
    const auto scale = add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero;
    cute::detail::explode(Op::fma, &descriptor_a, cute::int_sequence<0>{}, &descriptor_b,
                          cute::int_sequence<0>{}, d, cute::make_int_sequence<kN / 2>{}, &scale,
                          cute::int_sequence<0>{});
  }
};

template <int kSize>
CUTLASS_DEVICE void fence(float (&values)[kSize]) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kSize; ++i) cute::warpgroup_fence_operand(values[i]);
}

using Barrier = cutlass::arch::ClusterBarrier;
using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;

}  // namespace cutfuse::conv::shift::sm90
