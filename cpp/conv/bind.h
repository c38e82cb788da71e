/// \file
/// A laid-out problem and its buffers -> the shift kernel's parameters.
#pragma once

#include "conv/policy.h"

namespace cutfuse::conv {

/// A packed weight in device memory.
struct PackedWeight {
  const void* tiles = nullptr;
  const int32_t* exponents = nullptr;
};

/// All but what differs from pass to pass: program, partials and walk. kNotSupported if an image of
/// x spans too much.
Status bind(const FusedConvProblem& problem, const ConvPolicy& policy, const shift::Layout& layout,
            const ConvBuffers& buffers, const PackedWeight& packed, shift::Params* params) noexcept;

}  // namespace cutfuse::conv
