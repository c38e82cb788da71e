/// \file
/// Inline PTX, of which translate.py makes these calls.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

namespace emulated {

struct PtxOperand {
  void* to;  // null if it is only read
  uint32_t bytes;
  uint64_t value;
};
template <class T>
PtxOperand written(T& to) {
  PtxOperand operand{&to, sizeof(T), 0};
  std::memcpy(&operand.value, &to, sizeof(T));
  return operand;
}
template <class T>
PtxOperand read(const T& from) {
  PtxOperand operand{nullptr, sizeof(T), 0};
  std::memcpy(&operand.value, &from, sizeof(T));
  return operand;
}

struct Argument {
  enum Kind { kOperand, kRegister, kConstant, kSpecial, kMemory, kVector } kind;
  int index = 0;  // of the operand or register
  uint64_t value = 0;
  std::string name;             // of a special register
  std::vector<Argument> parts;  // of a vector, or the address and the coordinates at it
};

struct Instruction {
  int predicate = -1;  // register
  bool if_not = false;
  std::string name;  // with all that follows its points
  int bytes = 4;     // of a value that it moves
  void (*run)(struct Call&, const Instruction&) = nullptr;
  std::vector<Argument> arguments;
};

/// The instructions of one asm statement, read once.
class Ptx {
 public:
  explicit Ptx(const char* text);

  std::vector<Instruction> instructions;
  int registers = 0;
};

void run_ptx(const Ptx& ptx, std::initializer_list<PtxOperand> operands);

}  // namespace emulated
