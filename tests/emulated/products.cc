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

/// One instruction of one thread, on its way.
struct Product {
  std::vector<float*> sums;
  uint64_t a, b;        // descriptors
  bool a_in_registers;  // of the warpgroup's threads
  bool add, bfloat;
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

float value_of(const unsigned char* at, bool bfloat) {
  static const std::vector<float> halves = [] {
    std::vector<float> all(65536);
    for (int bits = 0; bits < 65536; ++bits) all[bits] = value_of(uint16_t(bits));
    return all;
  }();
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  if (!bfloat) return halves[bits];
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

/// `rows` x 16 values, K-major: PTX ISA, "Matrix descriptor" and "Shared memory matrix layout".
std::vector<float> read_matrix(uint64_t descriptor, int rows, bool bfloat) {
  const uint32_t start = (descriptor & 0x3fff) << 4;
  const uint32_t leading = (descriptor >> 16 & 0x3fff) << 4;
  const uint32_t stride = (descriptor >> 32 & 0x3fff) << 4;
  const unsigned mode = descriptor >> 62;  // 0: none, 1: 128, 2: 64, 3: 32 bytes
  const uint32_t row_bytes = mode == 0 ? 16 : 256 >> mode;
  const uint32_t mask = mode == 0 ? 0 : (8u >> (mode - 1)) - 1;
  if ((descriptor >> 49 & 7) != 0) std::abort();  // a base offset
  std::vector<float> values(size_t(rows) * 16);
  for (int row = 0; row < rows; ++row) {
    for (int k = 0; k < 16; ++k) {
      uint32_t at = start + row / 8 * stride + row % 8 * row_bytes;
      at += mode == 0 ? k / 8 * leading + k % 8 * 2 : k * 2;
      at ^= (at >> 7 & mask) << 4;
      values[row * 16 + k] = value_of(here->shared + at, bfloat);
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
    if (!product.a_in_registers) operands.a = read_matrix(product.a, 64, product.bfloat);
    operands.b = read_matrix(product.b, columns, product.bfloat);
  }
  const unsigned thread = here->thread.x % kGroup, lane = thread % 32;
  for (int i = 0; i < columns / 2; ++i) {
    const int row = thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    const float* const a = &operands.a[row * 16];
    const float* const b = &operands.b[column * 16];
    double sum = product.add ? *product.sums[i] : 0.0;
    for (int k = 0; k < 16; ++k) sum += double(a[k]) * b[k];
    *product.sums[i] = truncated(sum);
  }
  if (++operands.readers == kGroup) of_warpgroups.erase(key);
}

/// The 64 x 16 values of A that a thread holds, as an instruction begins.
void hold(const Call& call, const std::vector<Argument>& words, int64_t number, bool bfloat) {
  Operands& operands = of_warpgroups[{here->number / kGroup, number}];
  operands.a.resize(64 * 16);
  const unsigned thread = here->thread.x % kGroup, lane = thread % 32;
  for (unsigned i = 0; i < words.size(); ++i) {
    const auto word = static_cast<uint32_t>(call.get(words[i]));
    const unsigned row = thread / 32 * 16 + lane / 4 + i % 2 * 8;
    for (unsigned k = 0; k < 2; ++k) {
      const auto half = static_cast<uint16_t>(word >> 16 * k);
      unsigned char bytes[2];
      std::memcpy(bytes, &half, 2);
      operands.a[row * 16 + i / 2 * 8 + lane % 4 * 2 + k] = value_of(bytes, bfloat);
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
  const bool half = i.name.find(".f32.f16.f16") != std::string::npos;
  const bool bfloat = i.name.find(".f32.bf16.bf16") != std::string::npos;
  const bool held = i.arguments[1].kind == Argument::kVector;
  if ((!half && !bfloat) || call.get(i.arguments[4]) != 1 || call.get(i.arguments[5]) != 1 ||
      call.get(i.arguments[6]) != 0 || (!held && call.get(i.arguments[7]) != 0)) {
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
  product.bfloat = bfloat;
  product.number = mine().count++;
  if (held) hold(call, i.arguments[1].parts, product.number, bfloat);
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
