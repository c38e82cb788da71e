// Reads inline PTX and runs it.
#include "ptx.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "call.h"
#include "machine.h"

namespace emulated {

void unknown(const std::string& what) {
  std::fprintf(stderr, "not emulated: %s\n", what.c_str());
  std::abort();
}

namespace {

/// Reads one statement after the other.
class Reader {
 public:
  Reader(const char* text, Ptx* ptx) : text_(text), ptx_(ptx) {}

  void read() {
    while (skip(" \t\n{};")) {
      const std::string word = take_word();
      if (word == ".reg") {
        skip_statement();
      } else if (*text_ == ':') {
        ++text_;  // a label: the branches to it wait, which try_wait does
      } else {
        Instruction instruction;
        std::string name = word;
        if (word[0] == '@') {
          instruction.if_not = word[1] == '!';
          instruction.predicate = register_of(word.substr(instruction.if_not ? 2 : 1));
          skip(" \t\n");
          name = take_word();
        }
        read_instruction(name, instruction);
      }
    }
  }

 private:
  const char* text_;
  Ptx* ptx_;
  std::map<std::string, int> registers_;

  bool skip(const char* characters) {
    text_ += std::strspn(text_, characters);
    return *text_ != 0;
  }
  void skip_statement() { text_ += std::strcspn(text_, ";"); }
  std::string take_word() {
    // "::" belongs to a word, ":" ends it.
    const char* const start = text_;
    while (*text_ != 0 && (std::isalnum(*text_) || std::strchr("._@!%", *text_) != nullptr ||
                           (text_[0] == ':' && text_[1] == ':') ||
                           (text_ > start && text_[0] == ':' && text_[-1] == ':'))) {
      ++text_;
    }
    if (text_ == start) unknown("\"" + std::string(start) + "\"");
    return {start, text_};
  }
  int register_of(const std::string& name) {
    const auto found = registers_.emplace(name, ptx_->registers);
    if (found.second) ++ptx_->registers;
    return found.first->second;
  }

  Argument argument() {
    skip(" \t\n");
    Argument found{};
    if (*text_ == '{' || *text_ == '[') {
      found.kind = *text_ == '{' ? Argument::kVector : Argument::kMemory;
      const char end = *text_++ == '{' ? '}' : ']';
      while (skip(" \t\n,") && *text_ != end) found.parts.push_back(argument());
      ++text_;
      return found;
    }
    const std::string word = take_word();
    if (word[0] == '%' && std::isdigit(word[1])) {
      found.kind = Argument::kOperand;
      found.index = std::stoi(word.substr(1));
    } else if (std::isdigit(word[0])) {
      found.kind = Argument::kConstant;
      found.value = std::stoull(word, nullptr, 0);
    } else if (word.find("cluster") != std::string::npos || word == "%%laneid" ||
               word == "%%globaltimer") {
      found.kind = Argument::kSpecial;
      found.name = word;
    } else {
      found.kind = Argument::kRegister;
      found.index = register_of(word);
    }
    if (*text_ == '|') {  // two results
      ++text_;
      Argument both{};
      both.kind = Argument::kVector;
      both.parts = {found, argument()};
      return both;
    }
    return found;
  }

  void read_instruction(const std::string& name, Instruction& instruction) {
    instruction.name = name;
    if (name == "bra") return skip_statement();
    while (skip(" \t\n,") && *text_ != ';') instruction.arguments.push_back(argument());
    instruction.bytes = name.size() > 2 && name.compare(name.size() - 2, 2, "16") == 0 ? 2 : 4;
    instruction.run = handler_of(name);
    ptx_->instructions.push_back(instruction);
  }
};

uint64_t special(const std::string& name) {
  const unsigned rank = here->block.x % here->cluster;
  if (name == "%%laneid") return here->thread.x % 32;
  if (name == "%%globaltimer") {  // who looks again and again has waited
    static uint64_t time = 0;
    return time += 100000;
  }
  if (name == "%%cluster_ctarank" || name == "%%cluster_ctaid.x") return rank;
  if (name == "%%cluster_nctaid.x") return here->cluster;
  if (name == "%%clusterid.x") return here->block.x / here->cluster;
  if (name == "%%clusterid.y") return here->block.y;
  if (name == "%%clusterid.z") return here->block.z;
  if (name == "%%nclusterid.x") return here->grid.x / here->cluster;
  if (name == "%%nclusterid.y") return here->grid.y;
  if (name == "%%nclusterid.z") return here->grid.z;
  const bool one = name == "%%cluster_nctaid.y" || name == "%%cluster_nctaid.z";
  if (!one && name != "%%cluster_ctaid.y" && name != "%%cluster_ctaid.z") unknown(name);
  return one;
}

}  // namespace

Ptx::Ptx(const char* text) { Reader(text, this).read(); }

unsigned char* shared_at(uint32_t address) {
  const uint32_t rank = address >> 24;
  return (rank == 0 ? here->shared : shared_of(rank - 1)) + (address & 0xffffff);
}

uint64_t Call::get(const Argument& from) const {
  switch (from.kind) {
    case Argument::kOperand:
      return operands[from.index];
    case Argument::kRegister:
      return registers[from.index];
    case Argument::kConstant:
      return from.value;
    case Argument::kSpecial:
      return special(from.name);
    default:
      unknown("a vector as a value");
  }
}

void Call::set(const Argument& to, uint64_t value) {
  if (to.kind == Argument::kOperand) {
    operands[to.index] = value;
    std::memcpy(given[to.index].to, &value, given[to.index].bytes);
  } else {
    registers[to.index] = value;
  }
}

void run_ptx(const Ptx& ptx, std::initializer_list<PtxOperand> operands) {
  uint64_t values[160];
  if (operands.size() > 160 || ptx.registers > 8) unknown("so many operands");
  std::transform(operands.begin(), operands.end(), values,
                 [](const PtxOperand& operand) { return operand.value; });
  Call call{operands.begin(), values};
  for (const Instruction& instruction : ptx.instructions) {
    if (instruction.run == nullptr) unknown(instruction.name);
    if (instruction.predicate >= 0 &&
        (call.registers[instruction.predicate] != 0) == instruction.if_not) {
      continue;
    }
    instruction.run(call, instruction);
  }
}

}  // namespace emulated
