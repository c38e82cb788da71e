/// \file
/// Numbers of a call -> buffers of the contract, for every kind of fused operator.
#pragma once

#include "bindings/bindings.h"
#include "cutfuse/batch_norm.h"
#include "cutfuse/program.h"

namespace cutfuse::bindings {

template <class Call>
Status without_gil(const Call& call) {
  const pybind11::gil_scoped_release release;
  return call();
}

/// Fixed room for the operands of one program: more than kMaxSteps cannot all be read.
struct OperandList {
  Operand values[kMaxSteps];
  int32_t count = 0;

  OperandList(const pybind11::handle& sequence, const char* name);
};

/// From nine numbers, or None.
BatchNormBuffers batch_norm_buffers(const pybind11::object& pointers, double momentum, double eps);

}  // namespace cutfuse::bindings
