#include "program/device_program.h"

#include <limits>

#include "core/status.h"

namespace cutfuse {

Status append(const Program& program, const Operand* operands, int32_t operand_count,
              DeviceProgram* bound) noexcept {
  CUTFUSE_CHECK(operand_count >= 0 && operand_count <= kMaxSteps, Code::kInvalidValue,
                "%d operands for one program; it has at most %d steps with one each", operand_count,
                kMaxSteps);
  if (Status status = validate(program, operand_count); !status.ok()) return status;
  for (int32_t i = 0; i < program.count; ++i) {
    Step step = program.steps[i];
    if (step.operand >= 0) step.operand += bound->operand_count;
    bound->steps[bound->count++] = step;
  }
  for (int32_t i = 0; i < operand_count; ++i) {
    CUTFUSE_CHECK(operands[i].data != nullptr, Code::kInvalidValue,
                  "operand %d of the program is null; give it a device pointer", i);
    bound->operands[bound->operand_count++] = operands[i];
  }
  return {};
}

void append(Op op, int32_t operand, DeviceProgram* bound) noexcept {
  Step step;
  step.op = op;
  step.operand = operand;
  bound->steps[bound->count++] = step;
}

Ending ending_of(const DeviceProgram& program) noexcept {
  Ending ending;
  int32_t last = program.count - 1;
  if (last >= 1 && program.steps[last].operand < 0) {
    const Step& step = program.steps[last];
    const float constant = step.constants[0];
    if (step.op == Op::kMul) ending.factor = constant;
    if (step.op == Op::kAdd) ending.term = constant;
    if (step.op == Op::kSub) ending.term = -constant;
    if (step.op == Op::kMul || step.op == Op::kAdd || step.op == Op::kSub) --last;
  }
  if (last < 0 || program.steps[last].op != Op::kSigmoid) return {};
  ending.first = last;
  return ending;
}

bool bounds_of(const Step& step, float* lowest, float* highest) noexcept {
  *lowest = -std::numeric_limits<float>::infinity();
  *highest = std::numeric_limits<float>::infinity();
  switch (step.op) {
    case Op::kRelu:
      *lowest = 0.f;
      return true;
    case Op::kMaximum:
      *lowest = step.constants[0];
      return true;
    case Op::kMinimum:
      *highest = step.constants[0];
      return true;
    case Op::kClamp:
      *lowest = step.constants[0];
      *highest = step.constants[1];
      return true;
    default:
      return false;
  }
}

}  // namespace cutfuse
