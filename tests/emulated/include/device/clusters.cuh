#pragma once

#include "machine.h"

namespace cutfuse {

inline uint32_t cluster_rank() { return emulated::here->block.x % emulated::here->cluster; }

inline void sync_cluster() { emulated::meet_cluster(true, true); }

template <class T>
const T* shared_of(const T* own, uint32_t rank) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(own);
  return reinterpret_cast<const T*>(emulated::shared_of(rank) + (bytes - emulated::here->shared));
}

}  // namespace cutfuse
