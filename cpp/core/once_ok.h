/// \file
/// What several threads need done once, and again after it failed.
#pragma once

#include <atomic>
#include <mutex>

#include "cutfuse/status.h"

namespace cutfuse {

class OnceOk {
 public:
  /// `body` unless it has succeeded before, by one thread at a time.
  template <class Body>
  Status run(const Body& body) {
    if (done_.load(std::memory_order_acquire)) return {};
    const std::lock_guard lock(mutex_);
    if (done_.load(std::memory_order_relaxed)) return {};
    const Status status = body();
    if (status.ok()) done_.store(true, std::memory_order_release);
    return status;
  }

 private:
  std::atomic<bool> done_{false};
  std::mutex mutex_;
};

}  // namespace cutfuse
