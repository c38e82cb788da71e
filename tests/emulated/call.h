// What the instructions' handlers share.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ptx.h"

namespace emulated {

/// One execution of an asm statement by one thread.
struct Call {
  const PtxOperand* given;
  uint64_t* operands;  // their values
  uint64_t registers[8] = {};

  uint64_t get(const Argument& from) const;
  void set(const Argument& to, uint64_t value);
};

/// Where a 32-bit address of shared memory lies, of the own block or of another of its cluster.
unsigned char* shared_at(uint32_t address);

/// An mbarrier as it lies in shared memory.
struct Barrier {
  uint16_t expected, pending;
  int32_t bytes_and_phase;  // bytes still expected times two, plus the phase's parity

  void arrive(int count, int32_t more_bytes) {
    pending -= count;
    bytes_and_phase += 2 * more_bytes;
    if (pending == 0 && bytes_and_phase >> 1 == 0) {
      pending = expected;
      bytes_and_phase ^= 1;
    }
  }
  bool passed(bool parity) const { return (bytes_and_phase & 1) != parity; }
};
static_assert(sizeof(Barrier) == 8);

using Handler = void (*)(Call&, const Instruction&);

[[noreturn]] void unknown(const std::string& what);

// instructions.cc: of an instruction, or null.
Handler handler_of(const std::string& name);

// copies.cc
void copy_async(Call& call, const Instruction& instruction);
void copy_bulk(Call& call, const Instruction& instruction);
void copy_box(Call& call, const Instruction& instruction);
void commit_copies(Call& call, const Instruction& instruction);
void wait_for_copies(Call& call, const Instruction& instruction);

// products.cc
void multiply(Call& call, const Instruction& instruction);
void commit_products(Call& call, const Instruction& instruction);
void wait_for_products(Call& call, const Instruction& instruction);

}  // namespace emulated
