/// \file
/// What this build is for.
#pragma once

namespace cutfuse {

/// Architectures that kernels were compiled for, for example "sm_90a".
const char* architectures() noexcept;

}  // namespace cutfuse
