// The ending of a program, for pytest.
#include <pybind11/pybind11.h>

#include "program/device_program.h"

namespace py = pybind11;

namespace {

// Of steps (op, operand or -1, constant): (first, factor, term), or None.
py::object ending_of(const py::sequence& steps) {
  cutfuse::DeviceProgram program;
  for (const py::handle& given : steps) {
    const auto step = given.cast<py::tuple>();
    cutfuse::Step& made = program.steps[program.count++];
    made.op = static_cast<cutfuse::Op>(step[0].cast<int32_t>());
    made.operand = step[1].cast<int32_t>();
    made.constants[0] = step[2].cast<float>();
  }
  const cutfuse::Ending ending = cutfuse::ending_of(program);
  if (ending.first == cutfuse::kMaxDeviceSteps) return py::none();
  return py::make_tuple(ending.first, ending.factor, ending.term);
}

}  // namespace

void add_program(py::module_& module) { module.def("ending_of", &ending_of); }
