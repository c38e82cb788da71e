#include "cutfuse/program.h"

#include <cmath>
#include <cstring>

#include "core/status.h"
#include "program/step_math.h"

namespace cutfuse {
namespace {

// Constants that an op reads; a binary op reads one, unless it has an operand.
int constant_count(const Step& step) {
  switch (step.op) {
    case Op::kAdd:
    case Op::kSub:
    case Op::kMul:
    case Op::kDiv:
      return step.operand < 0 ? 1 : 0;
    case Op::kMinimum:
    case Op::kMaximum:
    case Op::kLeakyRelu:
      return 1;
    case Op::kClamp:
    case Op::kSoftplus:
      return 2;
    default:
      return 0;
  }
}

bool is_op(int64_t code) { return code >= 0 && code < kOpCount; }

bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof(a)) == 0; }

Status check_step_count(int64_t count) {
  CUTFUSE_CHECK(count >= 0 && count <= kMaxSteps, Code::kInvalidValue,
                "the program has %lld steps but may have 0 to %d; apply the others before or after "
                "the operator",
                static_cast<long long>(count), kMaxSteps);
  return {};
}

Status check_op(int32_t index, int64_t code) {
  CUTFUSE_CHECK(
      is_op(code), Code::kInvalidValue,
      "step %d has op code %lld but the codes are 0 to %d (enum Op in cutfuse/program.h); "
      "take codes from the library that runs them",
      index, static_cast<long long>(code), kOpCount - 1);
  return {};
}

Status check_step(int32_t index, const Step& step) {
  CUTFUSE_CHECK(step.operand >= -1, Code::kInvalidValue,
                "step %d (%s) has operand %d but an operand is -1 (none) or an index from 0", index,
                to_string(step.op), step.operand);
  CUTFUSE_CHECK(step.operand < 0 || is_binary(step.op), Code::kInvalidValue,
                "step %d (%s) has operand %d but only add, sub, mul and div take one; give %s "
                "constants or none",
                index, to_string(step.op), step.operand, to_string(step.op));
  const bool bounds = step.op == Op::kClamp || step.op == Op::kMinimum || step.op == Op::kMaximum;
  CUTFUSE_CHECK(
      !bounds || !(std::isnan(step.constants[0]) || std::isnan(step.constants[1])),
      Code::kInvalidValue,
      "step %d (%s) has bounds [%g, %g] but they must be numbers; use infinities for an open side",
      index, to_string(step.op), static_cast<double>(step.constants[0]),
      static_cast<double>(step.constants[1]));
  for (int i = constant_count(step); i < 2; ++i) {
    CUTFUSE_CHECK(same_bits(step.constants[i], 0.f), Code::kInvalidValue,
                  "step %d (%s) does not read constants[%d] but has %g there; set it to 0, so that "
                  "equal programs compare equal",
                  index, to_string(step.op), i, static_cast<double>(step.constants[i]));
  }
  return {};
}

// True if 1 / value is exact, so that division by it may become multiplication.
bool has_exact_reciprocal(float value) {
  int exponent = 0;
  return std::isfinite(value) && std::fabs(std::frexp(value, &exponent)) == 0.5f &&
         std::isfinite(1.f / value);
}

Step constant_step(Op op, float value) {
  Step step;
  step.op = op;
  step.constants[0] = value;
  return step;
}

}  // namespace

bool operator==(const Step& a, const Step& b) noexcept {
  return a.op == b.op && a.operand == b.operand && same_bits(a.constants[0], b.constants[0]) &&
         same_bits(a.constants[1], b.constants[1]);
}

bool operator==(const Program& a, const Program& b) noexcept {
  if (a.count != b.count) return false;
  for (int32_t i = 0; i < a.count; ++i) {
    if (!(a.steps[i] == b.steps[i])) return false;
  }
  return true;
}

Status make_program(const int64_t* codes, int64_t code_count, const double* constants,
                    int64_t constant_count_given, Program* program) noexcept {
  CUTFUSE_CHECK(code_count >= 0 && code_count % 2 == 0, Code::kInvalidValue,
                "the program has %lld codes but each step needs two, its op and its operand",
                static_cast<long long>(code_count));
  CUTFUSE_CHECK(constant_count_given == code_count, Code::kInvalidValue,
                "the program has %lld constants for %lld steps but each step needs two (0 where it "
                "reads fewer)",
                static_cast<long long>(constant_count_given),
                static_cast<long long>(code_count / 2));
  if (Status status = check_step_count(code_count / 2); !status.ok()) return status;
  Program made;
  made.count = static_cast<int32_t>(code_count / 2);
  for (int32_t i = 0; i < made.count; ++i) {
    const int64_t operand = codes[2 * i + 1];
    if (Status status = check_op(i, codes[2 * i]); !status.ok()) return status;
    CUTFUSE_CHECK(operand >= -1 && operand <= INT32_MAX, Code::kInvalidValue,
                  "step %d has operand %lld but an operand is -1 (none) or an index from 0 to %d",
                  i, static_cast<long long>(operand), INT32_MAX);
    Step& step = made.steps[i];
    step.op = static_cast<Op>(codes[2 * i]);
    step.operand = static_cast<int32_t>(operand);
    for (int c = 0; c < constant_count(step); ++c) {
      step.constants[c] = static_cast<float>(constants[2 * i + c]);
    }
    if (Status status = check_step(i, step); !status.ok()) return status;
  }
  *program = made;
  return {};
}

Status validate(const Program& program, int32_t operand_count) noexcept {
  if (Status status = check_step_count(program.count); !status.ok()) return status;
  for (int32_t i = 0; i < program.count; ++i) {
    const Step& step = program.steps[i];
    if (Status status = check_op(i, static_cast<int64_t>(step.op)); !status.ok()) return status;
    if (Status status = check_step(i, step); !status.ok()) return status;
    CUTFUSE_CHECK(step.operand < operand_count, Code::kInvalidValue,
                  "step %d (%s) reads operand %d but %d operands are given; give at least %d", i,
                  to_string(step.op), step.operand, operand_count, step.operand + 1);
  }
  return {};
}

Program canonicalise(const Program& program) noexcept {
  Program result;
  for (int32_t i = 0; i < program.count; ++i) {
    Step step = program.steps[i];
    if (step.operand < 0) {
      const float c = step.constants[0];
      if ((step.op == Op::kMul || step.op == Op::kDiv) && c == 1.f) continue;
      if (step.op == Op::kSub) {
        step = constant_step(Op::kAdd, -c);
      } else if (step.op == Op::kDiv && has_exact_reciprocal(c)) {
        step = constant_step(Op::kMul, 1.f / c);
      }
    }
    result.steps[result.count++] = step;
  }
  return result;
}

float run(const Program& program, float value, const float* operands) noexcept {
  for (int32_t i = 0; i < program.count; ++i) {
    const Step& step = program.steps[i];
    const float a = step.operand < 0 ? step.constants[0] : operands[step.operand];
    visit(step.op,
          [&](auto tag) { value = evaluate<decltype(tag)::value>(value, a, step.constants[1]); });
  }
  return value;
}

}  // namespace cutfuse
