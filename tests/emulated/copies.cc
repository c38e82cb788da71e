// The copy engine: asynchronous copies. What is copied is read as late as it may
// be.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>

#include "call.h"
#include "machine.h"
#include "maps.h"

namespace emulated {
namespace {

using Task = std::function<void()>;

/// Of one thread: what it has asked for since its last commit, and its commits.
struct Groups {
  std::vector<Task> open;
  std::deque<std::vector<Task>> committed;

  void commit() {
    committed.push_back(std::move(open));
    open.clear();
  }
  void wait(size_t most) {
    while (committed.size() > most) {
      for (const Task& task : committed.front()) task();
      committed.pop_front();
    }
  }
};
std::vector<std::array<Groups, 2>> of_threads;  // cp.async, and bulk

Groups& mine(bool bulk) {
  if (of_threads.size() <= here->number) of_threads.resize(here->number + 1);
  return of_threads[here->number][bulk];
}
bool is_bulk(const Instruction& i) { return i.name.find("bulk") != std::string::npos; }

void demand(bool holds, const Instruction& i, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s: %s\n", i.name.c_str(), what);
  std::abort();
}

uint32_t swizzled(uint32_t offset, uint32_t mask) { return offset ^ ((offset >> 7 & mask) << 4); }

/// The element at `at` of the tensor, or null outside of it.
unsigned char* element_at(const TensorMap& map, const int64_t* at) {
  int64_t offset = at[0] * map.element;
  for (int d = 0; d < map.rank; ++d) {
    if (at[d] < 0 || at[d] >= map.sizes[d]) return nullptr;
    if (d > 0) offset += at[d] * int64_t(map.strides[d - 1]);
  }
  return reinterpret_cast<unsigned char*>(map.address) + offset;
}

/// To the nearest; what is not finite stays.
void round_to_tf32(unsigned char* at) {
  uint32_t bits;
  std::memcpy(&bits, at, sizeof(bits));
  if ((bits >> 23 & 255) == 255) return;
  bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
  std::memcpy(at, &bits, sizeof(bits));
}

/// visit(element, offset) for the elements of a box in their order in shared memory.
template <class Visit>
void for_each_of_box(const TensorMap& map, const std::array<int64_t, 5>& first,
                     const Visit& visit) {
  uint32_t offset = 0;
  std::array<int64_t, 5> at{}, in_box{};
  while (true) {
    for (int d = 0; d < map.rank; ++d) at[d] = first[d] + in_box[d];
    visit(element_at(map, at.data()), offset);
    offset += map.element;
    int d = 0;
    while (d < map.rank && ++in_box[d] == map.box[d]) in_box[d++] = 0;
    if (d == map.rank) return;
  }
}

/// As for_each_of_box: channels of pixels, which are walked over within their bounds.
template <class Visit>
void for_each_of_images(const TensorMap& map, std::array<int64_t, 5> pixel,
                        const std::array<int64_t, 3>& offsets, const Visit& visit) {
  uint32_t offset = 0;
  for (int number = 0; number < map.box[1]; ++number) {
    std::array<int64_t, 5> at = {0, pixel[1] + offsets[0], pixel[2] + offsets[1], pixel[3], 0};
    for (int channel = 0; channel < map.box[0]; ++channel) {
      at[0] = pixel[0] + channel;
      visit(element_at(map, at.data()), offset);
      offset += map.element;
    }
    pixel[1] += map.steps[1];
    for (int d = 1; d < 3 && pixel[d] >= int64_t(map.sizes[d]) + map.upper[d - 1]; ++d) {
      pixel[d] = map.lower[d - 1];
      pixel[d + 1] += d == 1 ? map.steps[2] : 1;
    }
  }
}

void load_box(Call& call, const Instruction& i) {
  const Argument& source = i.arguments[1];
  TensorMap map;
  std::memcpy(&map, reinterpret_cast<const void*>(call.get(source.parts[0])), sizeof(map));
  std::array<int64_t, 5> first{};
  std::array<int64_t, 3> offsets{};
  const std::vector<Argument>& coordinates = source.parts[1].parts;
  demand(coordinates.size() == map.rank, i, "not the map's rank");
  for (size_t d = 0; d < coordinates.size(); ++d) first[d] = int32_t(call.get(coordinates[d]));
  const bool images = i.name.find("im2col") != std::string::npos;
  demand(images == bool(map.images), i, "another kind of map");
  if (images) {
    for (size_t d = 0; d < 2; ++d) offsets[d] = uint16_t(call.get(i.arguments[3].parts[d]));
    for (int d = 0; d < 2; ++d) {
      demand(
          first[d + 1] >= map.lower[d] && first[d + 1] < int64_t(map.sizes[d + 1]) + map.upper[d],
          i, "starts outside of the bounds");
    }
  }
  const uint32_t to = uint32_t(call.get(i.arguments[0].parts[0]));
  const uint32_t barrier = uint32_t(call.get(i.arguments[2].parts[0]));
  demand(to % 128 == 0 && barrier % 8 == 0, i, "misaligned");
  std::vector<unsigned char*> blocks;
  if (i.name.find("multicast") != std::string::npos) {
    demand(!images && (to | barrier) >> 24 == 0, i, "multicast of another kind");
    const auto mask = uint16_t(call.get(i.arguments[3]));
    for (unsigned rank = 0; rank < here->cluster; ++rank) {
      if (mask >> rank & 1) blocks.push_back(shared_of(rank));
    }
  } else {
    blocks.push_back(shared_at(to) - (to & 0xffffff));
  }
  later([=] {
    for (unsigned char* block : blocks) {
      uint32_t bytes = 0;
      const auto visit = [&](const unsigned char* from, uint32_t offset) {
        unsigned char* at = block + swizzled((to & 0xffffff) + offset, map.swizzle_mask);
        from == nullptr ? std::memset(at, 0, map.element) : std::memcpy(at, from, map.element);
        if (map.rounds) round_to_tf32(at);
        bytes += map.element;
      };
      if (images) {
        for_each_of_images(map, first, offsets, visit);
      } else {
        for_each_of_box(map, first, visit);
      }
      reinterpret_cast<Barrier*>(block + (barrier & 0xffffff))->arrive(0, -int32_t(bytes));
    }
  });
}

void store_box(Call& call, const Instruction& i) {
  const Argument& target = i.arguments[0];
  TensorMap map;
  std::memcpy(&map, reinterpret_cast<const void*>(call.get(target.parts[0])), sizeof(map));
  std::array<int64_t, 5> first{};
  const std::vector<Argument>& coordinates = target.parts[1].parts;
  demand(coordinates.size() == map.rank && !map.images, i, "not the map's rank");
  for (size_t d = 0; d < coordinates.size(); ++d) first[d] = int32_t(call.get(coordinates[d]));
  const uint32_t from = uint32_t(call.get(i.arguments[1].parts[0]));
  demand(from % 128 == 0, i, "misaligned");
  const unsigned char* const shared = here->shared;
  mine(true).open.push_back([=] {
    for_each_of_box(map, first, [&](unsigned char* to, uint32_t offset) {
      if (to == nullptr) return;
      std::memcpy(to, shared + swizzled(from + offset, map.swizzle_mask), map.element);
    });
  });
}

}  // namespace

void copy_box(Call& call, const Instruction& i) {
  i.name.find(".global.shared::cta") != std::string::npos ? store_box(call, i) : load_box(call, i);
}

void copy_bulk(Call& call, const Instruction& i) {
  const uint64_t to = call.get(i.arguments[0].parts[0]), from = call.get(i.arguments[1].parts[0]);
  const auto bytes = uint32_t(call.get(i.arguments[2]));
  demand((to | from | bytes) % 16 == 0, i, "misaligned");
  if (i.name.compare(0, 20, "cp.async.bulk.global") == 0) {
    const unsigned char* const at = shared_at(uint32_t(from));
    mine(true).open.push_back([=] { std::memcpy(reinterpret_cast<void*>(to), at, bytes); });
    return;
  }
  unsigned char* const at = shared_at(uint32_t(to));
  auto* const barrier =
      reinterpret_cast<Barrier*>(shared_at(uint32_t(call.get(i.arguments[3].parts[0]))));
  later([=] {
    std::memcpy(at, reinterpret_cast<const void*>(from), bytes);
    barrier->arrive(0, -int32_t(bytes));
  });
}

void copy_async(Call& call, const Instruction& i) {
  unsigned char* const to = shared_at(uint32_t(call.get(i.arguments[0].parts[0])));
  const auto* const from = reinterpret_cast<const void*>(call.get(i.arguments[1].parts[0]));
  const auto bytes = uint32_t(call.get(i.arguments[2]));
  const uint32_t exist = i.arguments.size() > 3 ? uint32_t(call.get(i.arguments[3])) : bytes;
  demand(reinterpret_cast<uintptr_t>(to) % bytes == 0 &&
             (exist == 0 || reinterpret_cast<uintptr_t>(from) % bytes == 0),
         i, "misaligned");
  mine(false).open.push_back([=] {
    std::memset(to, 0, bytes);
    std::memcpy(to, from, exist);
  });
}

void commit_copies(Call&, const Instruction& i) { mine(is_bulk(i)).commit(); }

void wait_for_copies(Call& call, const Instruction& i) {
  Groups& groups = mine(is_bulk(i));
  if (i.arguments.empty()) groups.commit();
  groups.wait(i.arguments.empty() ? 0 : call.get(i.arguments[0]));
}

void end_thread() {
  for (const bool bulk : {false, true}) {
    mine(bulk).commit();
    mine(bulk).wait(0);
  }
}

}  // namespace emulated
