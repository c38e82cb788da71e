#include "bindings/buffers.h"

#include <string>

namespace py = pybind11;

namespace cutfuse::bindings {

OperandList::OperandList(const py::handle& sequence, const char* name) {
  const Numbers numbers(sequence, name);
  if (numbers.size() % 4 != 0 || numbers.size() > 4 * kMaxSteps) {
    throw py::value_error(std::string(name) + " has " + std::to_string(numbers.size()) +
                          " numbers; it must have pointer, row stride, column stride and dtype "
                          "of at most " +
                          std::to_string(kMaxSteps) + " operands");
  }
  for (Py_ssize_t i = 0; i < numbers.size(); i += 4) {
    values[count++] = {pointer<const void>(numbers.integer(i)), numbers.integer(i + 1),
                       numbers.integer(i + 2), static_cast<DType>(numbers.integer(i + 3))};
  }
}

BatchNormBuffers batch_norm_buffers(const py::object& pointers, double momentum, double eps) {
  BatchNormBuffers buffers;
  buffers.momentum = momentum;
  buffers.eps = eps;
  if (pointers.is_none()) return buffers;
  const Numbers at(pointers, "batch_norm");
  if (at.size() != 9) {
    throw py::value_error("batch_norm has " + std::to_string(at.size()) +
                          " numbers; it must have 9: weight, bias, running_mean, running_var, "
                          "num_batches_tracked, dtype of weight and bias, dtype of the running "
                          "statistics, save_mean, save_invstd");
  }
  buffers.weight = pointer<const void>(at.integer(0));
  buffers.bias = pointer<const void>(at.integer(1));
  buffers.running_mean = pointer<void>(at.integer(2));
  buffers.running_var = pointer<void>(at.integer(3));
  buffers.num_batches_tracked = pointer<int64_t>(at.integer(4));
  buffers.affine_dtype = static_cast<DType>(at.integer(5));
  buffers.running_dtype = static_cast<DType>(at.integer(6));
  buffers.save_mean = pointer<float>(at.integer(7));
  buffers.save_invstd = pointer<float>(at.integer(8));
  return buffers;
}

}  // namespace cutfuse::bindings
