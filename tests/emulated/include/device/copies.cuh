#pragma once

#include "cuda_runtime.h"

namespace cutfuse {

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - emulated::here->shared);
}
inline unsigned char* dynamic_shared() { return emulated::here->shared; }
inline int2 load_shared(uint32_t address) {
  int2 words;
  std::memcpy(&words, emulated::here->shared + address, sizeof(words));
  return words;
}
inline uint32_t load_shared_word(uint32_t address) {
  uint32_t word;
  std::memcpy(&word, emulated::here->shared + address, sizeof(word));
  return word;
}
template <int kBytes>
void copy_async(void* to, const void* from, int bytes) {
  const auto misaligned = (reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from));
  if (bytes > 0 && misaligned % kBytes != 0) std::abort();
  std::memset(to, 0, kBytes);
  std::memcpy(to, from, bytes);
}
inline void commit_copies() {}
template <int kPending>
void wait_for_copies() {}

}  // namespace cutfuse
