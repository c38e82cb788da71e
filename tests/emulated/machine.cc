// Threads of a block as coroutines that take turns where they wait for each other.
#include <sys/mman.h>
#include <ucontext.h>

#include <vector>

#include "cuda_runtime.h"

namespace emulated {
namespace {

constexpr size_t kStackBytes = 256 << 10;

struct Thread {
  ucontext_t context;
  Place place;
  bool ended;
};

/// Those who have come, and how often all had.
struct Meeting {
  int waiting = 0, generation = 0;
};

std::vector<Thread> threads;
int current, alive;
ucontext_t home;
Meeting block_meeting, lane_meetings[33][kMostThreads];  // by how many lanes, and their number
void (*body)(void*);
void* data;

/// On to the next thread that has not ended, or home if there is none.
void yield() {
  ucontext_t* const from = &threads[current].context;
  const int count = static_cast<int>(threads.size());
  for (int step = 1; step <= count; ++step) {
    const int next = (current + step) % count;
    if (threads[next].ended) continue;
    if (next == current) return;
    current = next;
    here = &threads[next].place;
    swapcontext(from, &threads[next].context);
    return;
  }
  swapcontext(from, &home);
}

void meet(Meeting& meeting, int count) {
  const int generation = meeting.generation;
  if (++meeting.waiting == count) {
    meeting.waiting = 0;
    ++meeting.generation;
  }
  while (meeting.generation == generation) yield();
}

void start() {
  body(data);
  threads[current].ended = true;
  --alive;
  if (alive > 0 && block_meeting.waiting == alive) {
    block_meeting.waiting = 0;
    ++block_meeting.generation;
  }
  yield();
}

void run_block() {
  block_meeting = {};
  for (auto& meetings : lane_meetings)
    std::fill(std::begin(meetings), std::end(meetings), Meeting{});
  alive = static_cast<int>(threads.size());
  current = 0;
  here = &threads[0].place;
  swapcontext(&home, &threads[0].context);
}

}  // namespace

const Place* here;
alignas(1024) unsigned char shared[kSharedBytes];

void meet_block() { meet(block_meeting, alive); }
void meet_lanes(int lanes) {
  const int first = current / lanes * lanes;
  meet(lane_meetings[lanes][current / lanes],
       std::min(lanes, static_cast<int>(threads.size()) - first));
}

void run(dim3 grid, dim3 block, void (*new_body)(void*), void* new_data) {
  static auto* const stacks =
      static_cast<char*>(mmap(nullptr, kStackBytes * kMostThreads, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  body = new_body;
  data = new_data;
  threads.resize(block.x);
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        for (unsigned t = 0; t < block.x; ++t) {
          Thread& thread = threads[t];
          thread.place = {dim3(t, 0, 0), dim3(x, y, z), grid};
          thread.ended = false;
          getcontext(&thread.context);
          thread.context.uc_stack.ss_sp = stacks + t * kStackBytes;
          thread.context.uc_stack.ss_size = kStackBytes;
          makecontext(&thread.context, start, 0);
        }
        run_block();
      }
    }
  }
}

}  // namespace emulated
