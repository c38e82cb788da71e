// The instructions that touch neither tensor cores nor the copy engine, and the table of all.
#include <cmath>
#include <cstring>
#include <map>
#include <string>

#include "call.h"
#include "machine.h"

namespace emulated {
namespace {

void nothing(Call&, const Instruction&) {}

void move(Call& call, const Instruction& i) { call.set(i.arguments[0], call.get(i.arguments[1])); }
void set_not_equal(Call& call, const Instruction& i) {
  call.set(i.arguments[0],
           uint32_t(call.get(i.arguments[1])) != uint32_t(call.get(i.arguments[2])));
}
void set_equal(Call& call, const Instruction& i) {
  call.set(i.arguments[0],
           uint32_t(call.get(i.arguments[1])) == uint32_t(call.get(i.arguments[2])));
}
void select(Call& call, const Instruction& i) {
  call.set(i.arguments[0], call.get(i.arguments[call.get(i.arguments[3]) != 0 ? 1 : 2]));
}
/// The first lane of a warp is elected.
void elect(Call& call, const Instruction& i) {
  call.set(i.arguments[0].parts[0], 0);
  call.set(i.arguments[0].parts[1], here->thread.x % 32 == 0);
}

template <bool kStores>
void access_shared(Call& call, const Instruction& i) {
  const Argument& memory = i.arguments[kStores ? 0 : 1];
  const Argument& values = i.arguments[kStores ? 1 : 0];
  const size_t bytes = i.bytes;
  unsigned char* at = shared_at(uint32_t(call.get(memory.parts[0])));
  const size_t count = values.kind == Argument::kVector ? values.parts.size() : 1;
  if (reinterpret_cast<uintptr_t>(at) % (bytes * count) != 0) unknown("misaligned " + i.name);
  for (size_t k = 0; k < count; ++k) {
    const Argument& one = values.kind == Argument::kVector ? values.parts[k] : values;
    uint64_t value = kStores ? call.get(one) : 0;
    if constexpr (kStores) {
      std::memcpy(at + k * bytes, &value, bytes);
    } else {
      std::memcpy(&value, at + k * bytes, bytes);
      call.set(one, value);
    }
  }
}

// Addresses of the cluster's shared memory: a block's rank + 1 above bit 24, 0 for the own block.
void map_address(Call& call, const Instruction& i) {
  const auto address = uint32_t(call.get(i.arguments[1])) & 0xffffff;
  call.set(i.arguments[0], address | (uint32_t(call.get(i.arguments[2])) + 1) << 24);
}

/// Not a number if one is not.
void larger(Call& call, const Instruction& i) {
  const float a = __uint_as_float(uint32_t(call.get(i.arguments[1])));
  const float b = __uint_as_float(uint32_t(call.get(i.arguments[2])));
  call.set(i.arguments[0], __float_as_uint(isnan(a) || isnan(b) ? NAN : std::fmax(a, b)));
}

void barrier_sync(Call& call, const Instruction& i) {
  meet_named(call.get(i.arguments[0]), call.get(i.arguments[1]), true);
}
void barrier_arrive(Call& call, const Instruction& i) {
  meet_named(call.get(i.arguments[0]), call.get(i.arguments[1]), false);
}
void cluster_arrive(Call&, const Instruction&) { meet_cluster(true, false); }
void cluster_wait(Call&, const Instruction&) { meet_cluster(false, true); }

Barrier& barrier_at(Call& call, const Argument& memory) {
  return *reinterpret_cast<Barrier*>(shared_at(uint32_t(call.get(memory.parts[0]))));
}
void barrier_init(Call& call, const Instruction& i) {
  const auto count = uint16_t(call.get(i.arguments[1]));
  barrier_at(call, i.arguments[0]) = {count, count, 0};
}
void arrive(Call& call, const Instruction& i) { barrier_at(call, i.arguments[1]).arrive(1, 0); }
/// Copies of single values are done at once.
void arrive_after_copies(Call& call, const Instruction& i) {
  barrier_at(call, i.arguments[0]).arrive(1, 0);
}
void arrive_and_expect(Call& call, const Instruction& i) {
  barrier_at(call, i.arguments[1]).arrive(1, int32_t(call.get(i.arguments[2])));
}
void expect(Call& call, const Instruction& i) {
  barrier_at(call, i.arguments[0]).arrive(0, int32_t(call.get(i.arguments[1])));
}
void complete(Call& call, const Instruction& i) {
  barrier_at(call, i.arguments[0]).arrive(0, -int32_t(call.get(i.arguments[1])));
}
void try_wait(Call& call, const Instruction& i) {
  Barrier& barrier = barrier_at(call, i.arguments[1]);
  const bool parity = call.get(i.arguments[2]) & 1;
  wait_until([&] { return barrier.passed(parity); });
  call.set(i.arguments[0], 1);
}
void test_wait(Call& call, const Instruction& i) {
  Barrier& barrier = barrier_at(call, i.arguments[1]);
  call.set(i.arguments[0], barrier.passed(call.get(i.arguments[2]) & 1));
}

/// By how a name begins; the longest counts.
const std::map<std::string, Handler>& handlers() {
  static const std::map<std::string, Handler> all = {
      {"mov.", move},
      {"cvt.u64.u32", move},
      {"setp.ne.", set_not_equal},
      {"setp.eq.", set_equal},
      {"selp.", select},
      {"elect.sync", elect},
      {"max.NaN.f32", larger},
      {"ld.shared.", access_shared<false>},
      {"st.shared.", access_shared<true>},
      {"mapa.", map_address},
      {"fence.", nothing},
      {"griddepcontrol.", nothing},
      {"setmaxnreg.", nothing},
      {"prefetch.", nothing},
      {"bar.sync", barrier_sync},
      {"barrier.sync", barrier_sync},
      {"bar.arrive", barrier_arrive},
      {"barrier.arrive", barrier_arrive},
      {"barrier.cluster.arrive", cluster_arrive},
      {"barrier.cluster.wait", cluster_wait},
      {"mbarrier.init.", barrier_init},
      {"mbarrier.arrive.", arrive},
      {"mbarrier.arrive.expect_tx.", arrive_and_expect},
      {"mbarrier.expect_tx.", expect},
      {"mbarrier.complete_tx.", complete},
      {"mbarrier.try_wait.", try_wait},
      {"mbarrier.test_wait.", test_wait},
      {"wgmma.fence.", nothing},
      {"wgmma.mma_async.", multiply},
      {"wgmma.commit_group.", commit_products},
      {"wgmma.wait_group.", wait_for_products},
      {"cp.async.ca.", copy_async},
      {"cp.async.cg.", copy_async},
      {"cp.async.mbarrier.arrive.noinc.", arrive_after_copies},
      {"cp.async.commit_group", commit_copies},
      {"cp.async.wait_group", wait_for_copies},
      {"cp.async.wait_all", wait_for_copies},
      {"cp.async.bulk.tensor.", copy_box},
      {"cp.async.bulk.shared", copy_bulk},
      {"cp.async.bulk.global", copy_bulk},
      {"cp.async.bulk.commit_group", commit_copies},
      {"cp.async.bulk.wait_group", wait_for_copies},
  };
  return all;
}

}  // namespace

Handler handler_of(const std::string& name) {
  Handler found = nullptr;
  size_t longest = 0;
  for (const auto& [prefix, handler] : handlers()) {
    if (name.compare(0, prefix.size(), prefix) == 0 && prefix.size() >= longest) {
      longest = prefix.size();
      found = handler;
    }
  }
  return found;
}

}  // namespace emulated
