/// \file
/// The threads of some blocks, which run at the same time, as coroutines that take turns where they
/// wait for each other.
#pragma once

#include <vector_types.h>

#include <cstdint>
#include <functional>
#include <type_traits>

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace emulated {

inline constexpr int kMostThreads = 1024;    // of a block
inline constexpr int kSharedBytes = 232448;  // of a block

struct Place {
  dim3 thread, block, grid, block_size;
  unsigned cluster;       // blocks of a cluster, along x
  unsigned number;        // of the thread, among those that run at the same time
  unsigned char* shared;  // of the block
};
extern const Place* here;  // of the running thread

/// Of the block `rank` of the running thread's cluster.
unsigned char* shared_of(unsigned rank);

/// Lets others run until ready(data) is true.
void wait_until(bool (*ready)(void*), void* data);
template <class Ready>
void wait_until(Ready&& ready) {
  using Function = std::remove_reference_t<Ready>;
  wait_until([](void* data) { return (*static_cast<Function*>(data))(); }, &ready);
}

/// Lets others run, without a need.
void pause();

/// What a copy engine does on its own: soon, or as late as can be, when every thread waits.
void later(std::function<void()> what);

/// What a thread has asked the copy engine for and has not waited for is done when it ends.
void end_thread();

/// Waits for the threads of the block that have not ended; for those of a warp's part; for `count`
/// at a named barrier of the block, or only says that this thread has come; for the cluster.
void meet_block();
void meet_lanes(int lanes);
unsigned turn_of_lanes(int lanes);  // 0 or 1, from one meeting to the next
inline void meet_warp() { meet_lanes(32); }
void meet_named(unsigned name, unsigned count, bool wait);
void meet_cluster(bool arrive, bool wait);

/// Runs body() for every thread of every block: of a cluster at the same time, or of all.
void run(dim3 grid, dim3 block, unsigned cluster, bool all, void (*body)(void*), void* data);

template <class Body>
void run(dim3 grid, dim3 block, unsigned cluster, bool all, Body&& body) {
  using Function = std::remove_reference_t<Body>;
  run(grid, block, cluster, all, [](void* data) { (*static_cast<Function*>(data))(); }, &body);
}

}  // namespace emulated
