#include "machine.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulated {
namespace {

constexpr size_t kStackBytes = 512 << 10;

/// Those who have come, and how often all had.
struct Meeting {
  unsigned waiting = 0, generation = 0;

  void come(unsigned count) {
    if (++waiting == count) {
      waiting = 0;
      ++generation;
    }
  }
  void meet(unsigned count) {
    const unsigned mine = generation;
    come(count);
    wait_until([&] { return generation != mine; });
  }
};

struct Thread {
  ucontext_t context;  // where it begins
  jmp_buf place_left;  // and goes on
  bool begun;
  Place place;
  bool ended;
  bool (*ready)(void*);  // null: at once
  void* data;
  unsigned cluster_generation;
};

struct Block {
  Meeting all;
  std::array<Meeting, 16> named;
  std::array<std::array<Meeting, kMostThreads>, 33> lanes;  // by how many, and their number
  unsigned alive;
};

std::vector<Thread> threads;
std::vector<Block> blocks;
std::vector<Meeting> clusters;
std::deque<std::function<void()>> deferred;
unsigned current;
ucontext_t home;
void (*body)(void*);
void* body_data;

Block& my_block() { return blocks[here->number / here->block_size.x]; }

[[noreturn]] void stuck() {
  for (const Thread& thread : threads) {
    if (thread.ended) continue;
    std::fprintf(stderr, "thread %u of block %u waits forever\n", thread.place.thread.x,
                 thread.place.block.x);
    break;
  }
  std::abort();
}

void become(unsigned number) {
  current = number;
  here = &threads[number].place;
  threadIdx = {here->thread.x, here->thread.y, here->thread.z};
  blockIdx = {here->block.x, here->block.y, here->block.z};
  blockDim = here->block_size;
  gridDim = here->grid;
}

bool toss() {
  static uint32_t state = 1;
  state = state * 1664525 + 1013904223;
  return state >> 31 != 0;
}

void do_first_deferred() {
  const auto what = std::move(deferred.front());
  deferred.pop_front();
  what();
}

/// On to the next thread that can run, or home if all have ended.
void yield() {
  Thread* const from = &threads[current];
  if (!deferred.empty() && toss()) do_first_deferred();
  const auto count = static_cast<unsigned>(threads.size());
  while (true) {
    bool ended = true;
    for (unsigned step = 1; step <= count; ++step) {
      const unsigned next = current + step < count ? current + step : current + step - count;
      Thread& thread = threads[next];
      if (thread.ended) continue;
      ended = false;
      if (thread.ready != nullptr && !thread.ready(thread.data)) continue;
      thread.ready = nullptr;
      if (next == current) return;
      become(next);
      // Not swapcontext, which asks the kernel for the signal mask.
      if (_setjmp(from->place_left) != 0) return;
      if (thread.begun) _longjmp(thread.place_left, 1);
      thread.begun = true;
      setcontext(&thread.context);
    }
    if (!deferred.empty()) {
      do_first_deferred();
    } else if (ended) {
      setcontext(&home);
    } else {
      stuck();
    }
  }
}

void start() {
  body(body_data);
  end_thread();
  Block& block = my_block();
  threads[current].ended = true;
  --block.alive;
  if (block.alive > 0 && block.all.waiting == block.alive) {
    block.all.waiting = 0;
    ++block.all.generation;
  }
  yield();
}

/// Blocks first ... first + count - 1, numbered along x first.
void run_together(unsigned first, unsigned count, dim3 grid, dim3 size, unsigned cluster) {
  static auto* const stacks =
      static_cast<char*>(mmap(nullptr, kStackBytes * kMostThreads * 16, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  static auto* const shared =
      static_cast<unsigned char*>(std::aligned_alloc(1024, kSharedBytes * 32));
  if (count > 32 || count * size.x > kMostThreads * 16 || kSharedBytes % 1024 != 0) std::abort();
  std::memset(shared, 0xff, size_t(kSharedBytes) * count);  // NaN
  threads.resize(count * size.x);
  blocks.assign(count, Block{});
  clusters.assign(count / cluster, Meeting{});
  for (unsigned number = 0; number < threads.size(); ++number) {
    Thread& thread = threads[number];
    const unsigned block = first + number / size.x;
    thread.place = {dim3(number % size.x, 0, 0),
                    dim3(block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y),
                    grid,
                    size,
                    cluster,
                    number,
                    shared + size_t(kSharedBytes) * (number / size.x)};
    thread.ended = thread.begun = false;
    thread.ready = nullptr;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = stacks + number * kStackBytes;
    thread.context.uc_stack.ss_size = kStackBytes;
    makecontext(&thread.context, start, 0);
  }
  for (Block& block : blocks) block.alive = size.x;
  become(0);
  threads[0].begun = true;
  swapcontext(&home, &threads[0].context);
}

}  // namespace

const Place* here;

unsigned char* shared_of(unsigned rank) {
  const unsigned block = here->number / here->block_size.x;
  return here->shared +
         (std::ptrdiff_t(rank) - block % here->cluster) * std::ptrdiff_t(kSharedBytes);
}

void wait_until(bool (*ready)(void*), void* data) {
  if (ready(data)) return;
  threads[current].ready = ready;
  threads[current].data = data;
  yield();
}

void pause() { yield(); }

void later(std::function<void()> what) { deferred.push_back(std::move(what)); }

void meet_block() { my_block().all.meet(my_block().alive); }
void meet_lanes(int lanes) {
  const int me = here->thread.x, first = me / lanes * lanes;
  const int count = std::min<int>(lanes, here->block_size.x - first);
  my_block().lanes[lanes][me / lanes].meet(count);
}
unsigned turn_of_lanes(int lanes) {
  return my_block().lanes[lanes][here->thread.x / lanes].generation % 2;
}
void meet_named(unsigned name, unsigned count, bool wait) {
  Meeting& meeting = my_block().named.at(name);
  wait ? meeting.meet(count) : meeting.come(count);
}
void meet_cluster(bool arrive, bool wait) {
  Meeting& meeting = clusters[here->number / here->block_size.x / here->cluster];
  Thread& me = threads[current];
  if (arrive) {
    me.cluster_generation = meeting.generation;
    meeting.come(here->cluster * here->block_size.x);
  }
  if (wait) wait_until([&] { return meeting.generation != me.cluster_generation; });
}

void run(dim3 grid, dim3 block, unsigned cluster, bool all, void (*new_body)(void*), void* data) {
  body = new_body;
  body_data = data;
  const unsigned count = grid.x * grid.y * grid.z, step = all ? count : cluster;
  for (unsigned first = 0; first < count; first += step) {
    run_together(first, step, grid, block, cluster);
  }
}

}  // namespace emulated
