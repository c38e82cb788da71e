// The tensor cores of sm_90: products are made as late as they may be, when they are waited for.
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>

#include "call.h"
#include "machine.h"

namespace emulated {
namespace {

constexpr unsigned kGroup = 128;  // threads of a warpgroup

enum class Kind { kHalf, kBfloat, kTf32 };

/// Bytes of an element; an instruction takes 32 bytes of K.
constexpr int size_of(Kind kind) { return kind == Kind::kTf32 ? 4 : 2; }
constexpr int depth_of(Kind kind) { return 32 / size_of(kind); }

/// One instruction of one thread, on its way.
struct Product {
  std::vector<float*> sums;
  uint64_t a, b;        // descriptors
  bool a_in_registers;  // of the warpgroup's threads
  bool add;
  Kind kind;
  int64_t number;  // of the thread's products, the same in all threads of a warpgroup
};
struct Groups {
  std::vector<Product> open;
  std::deque<std::vector<Product>> committed;
  int64_t count = 0;
};
std::vector<Groups> of_threads;

/// Operands as all threads of a warpgroup read them: [row][k].
struct Operands {
  unsigned writers = 0;  // threads that have said what of A they hold
  unsigned readers = 0;
  std::vector<float> a, b;
};
std::map<std::pair<unsigned, int64_t>, Operands> of_warpgroups;

float value_of(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 31  ? (fraction != 0 ? NAN : INFINITY)
                     : exponent == 0 ? std::ldexp(float(fraction), -24)
                                     : std::ldexp(float(fraction + 1024), exponent - 25);
  return bits >> 15 != 0 ? -size : size;
}

float value_of(const unsigned char* at, Kind kind) {
  static const std::vector<float> halves = [] {
    std::vector<float> all(65536);
    for (int bits = 0; bits < 65536; ++bits) all[bits] = value_of(uint16_t(bits));
    return all;
  }();
  uint32_t wide;
  if (kind == Kind::kTf32) {
    std::memcpy(&wide, at, 4);
    wide &= ~0x1fffu;
  } else {
    uint16_t bits;
    std::memcpy(&bits, at, 2);
    if (kind == Kind::kHalf) return halves[bits];
    wide = uint32_t(bits) << 16;
  }
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

/// `rows` x 32 bytes of values, K-major: PTX ISA, "Matrix descriptor" and "Shared memory matrix
/// layout".
std::vector<float> read_matrix(uint64_t descriptor, int rows, Kind kind) {
  const uint32_t start = (descriptor & 0x3fff) << 4;
  const uint32_t leading = (descriptor >> 16 & 0x3fff) << 4;
  const uint32_t stride = (descriptor >> 32 & 0x3fff) << 4;
  const unsigned mode = descriptor >> 62;  // 0: none, 1: 128, 2: 64, 3: 32 bytes
  const uint32_t row_bytes = mode == 0 ? 16 : 256 >> mode;
  const uint32_t mask = mode == 0 ? 0 : (8u >> (mode - 1)) - 1;
  if ((descriptor >> 49 & 7) != 0) std::abort();  // a base offset
  const int depth = depth_of(kind);
  std::vector<float> values(size_t(rows) * depth);
  for (int row = 0; row < rows; ++row) {
    for (int k = 0; k < depth; ++k) {
      const int byte = k * size_of(kind);
      uint32_t at = start + row / 8 * stride + row % 8 * row_bytes;
      at += mode == 0 ? byte / 16 * leading + byte % 16 : byte;
      at ^= (at >> 7 & mask) << 4;
      values[row * depth + k] = value_of(here->shared + at, kind);
    }
  }
  return values;
}

/// As the tensor cores' accumulators, which lose a little more.
float truncated(double value) {
  const auto nearest = static_cast<float>(value);
  return std::fabs(nearest) > std::fabs(value) ? std::nextafter(nearest, 0.f) : nearest;
}

void finish(const Product& product) {
  const int columns = static_cast<int>(product.sums.size()) * 2;
  const std::pair<unsigned, int64_t> key{here->number / kGroup, product.number};
  Operands& operands = of_warpgroups[key];
  if (product.a_in_registers) wait_until([&] { return operands.writers == kGroup; });
  if (operands.readers == 0) {
    if (!product.a_in_registers) operands.a = read_matrix(product.a, 64, product.kind);
    operands.b = read_matrix(product.b, columns, product.kind);
  }
  const unsigned thread = here->thread.x % kGroup, lane = thread % 32;
  const int depth = depth_of(product.kind);
  for (int i = 0; i < columns / 2; ++i) {
    const int row = thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    const float* const a = &operands.a[row * depth];
    const float* const b = &operands.b[column * depth];
    double sum = product.add ? *product.sums[i] : 0.0;
    for (int k = 0; k < depth; ++k) sum += double(a[k]) * b[k];
    *product.sums[i] = truncated(sum);
  }
  if (++operands.readers == kGroup) of_warpgroups.erase(key);
}

/// The 64 rows of A's values that a thread holds, as an instruction begins.
void hold(const Call& call, const std::vector<Argument>& words, int64_t number, Kind kind) {
  Operands& operands = of_warpgroups[{here->number / kGroup, number}];
  const unsigned depth = depth_of(kind), each = 4 / size_of(kind);  // values of a word
  operands.a.resize(64 * depth);
  const unsigned thread = here->thread.x % kGroup, lane = thread % 32;
  for (unsigned i = 0; i < words.size(); ++i) {
    const auto word = static_cast<uint32_t>(call.get(words[i]));
    const unsigned row = thread / 32 * 16 + lane / 4 + i % 2 * 8;
    unsigned char bytes[4];
    std::memcpy(bytes, &word, 4);
    for (unsigned k = 0; k < each; ++k) {
      operands.a[row * depth + (i / 2 * 4 + lane % 4) * each + k] =
          value_of(bytes + k * size_of(kind), kind);
    }
  }
  ++operands.writers;
}

Groups& mine() {
  if (of_threads.size() <= here->number) of_threads.resize(here->number + 1);
  return of_threads[here->number];
}

}  // namespace

void multiply(Call& call, const Instruction& i) {
  const auto is_of = [&](const char* types) { return i.name.find(types) != std::string::npos; };
  const bool bfloat = is_of(".f32.bf16.bf16"), tf32 = is_of(".f32.tf32.tf32");
  const bool held = i.arguments[1].kind == Argument::kVector;
  bool holds = bfloat || tf32 || is_of(".f32.f16.f16");
  for (size_t k = 4; k < i.arguments.size(); ++k) {  // signs, and what is transposed
    holds = holds && call.get(i.arguments[k]) == (k < 6 ? 1 : 0);
  }
  if (!holds) {
    std::fprintf(stderr, "not emulated: %s of such operands\n", i.name.c_str());
    std::abort();
  }
  Product product;
  for (const Argument& to : i.arguments[0].parts) {
    product.sums.push_back(static_cast<float*>(call.given[to.index].to));
  }
  product.a_in_registers = held;
  product.a = held ? 0 : call.get(i.arguments[1]);
  product.b = call.get(i.arguments[2]);
  product.add = call.get(i.arguments[3]) != 0;
  product.kind = tf32 ? Kind::kTf32 : bfloat ? Kind::kBfloat : Kind::kHalf;
  product.number = mine().count++;
  if (held) hold(call, i.arguments[1].parts, product.number, product.kind);
  mine().open.push_back(std::move(product));
}

void commit_products(Call&, const Instruction&) {
  mine().committed.push_back(std::move(mine().open));
  mine().open.clear();
}

void wait_for_products(Call& call, const Instruction& i) {
  pause();  // what others do by now must not matter
  auto& committed = mine().committed;
  while (committed.size() > call.get(i.arguments[0])) {
    for (const Product& product : committed.front()) finish(product);
    committed.pop_front();
  }
}

}  // namespace emulated
