#include "cutfuse/program.h"

#include "bindings/bindings.h"

namespace py = pybind11;

namespace cutfuse::bindings {
namespace {

Program make(const py::object& codes, const py::object& constants) {
  const std::vector<int64_t> code_list = Numbers(codes, "codes").integers();
  const std::vector<double> constant_list = Numbers(constants, "constants").reals();
  Program program;
  check(make_program(code_list.data(), static_cast<int64_t>(code_list.size()), constant_list.data(),
                     static_cast<int64_t>(constant_list.size()), &program));
  return program;
}

std::vector<float> operand_values(const Program& program, const py::object& operands) {
  const std::vector<double> values = Numbers(operands, "operands").reals();
  check(validate(program, static_cast<int32_t>(values.size())));
  return std::vector<float>(values.begin(), values.end());
}

double run_host(const Program& program, double value, const py::object& operands) {
  const std::vector<float> values = operand_values(program, operands);
  const py::gil_scoped_release release;
  return run(program, static_cast<float>(value), values.data());
}

py::tuple vjp_host(const Program& program, double value, const py::object& operands, double grad) {
  const std::vector<float> values = operand_values(program, operands);
  std::vector<float> operand_grads(values.size(), 0.f);
  float value_grad = 0.f;
  {
    const py::gil_scoped_release release;
    value_grad = vjp(program, static_cast<float>(value), values.data(), static_cast<float>(grad),
                     operand_grads.data());
  }
  py::list grads;
  for (const float operand_grad : operand_grads) grads.append(operand_grad);
  return py::make_tuple(value_grad, grads);
}

py::dict op_codes() {
  py::dict codes;
  for (int32_t code = 0; code < kOpCount; ++code) {
    codes[to_string(static_cast<Op>(code))] = code;
  }
  return codes;
}

}  // namespace

void add_program(py::module_& module) {
  using namespace py::literals;
  module.attr("OPS") = op_codes();
  module.attr("MAX_STEPS") = kMaxSteps;
  py::class_<Program>(module, "Program", "A validated program of pointwise steps.")
      .def(py::init(&make), "codes"_a, "constants"_a)
      .def("__len__", [](const Program& program) { return program.count; })
      .def("__repr__", [](const Program& program) { return to_string(program); })
      .def(
          "__eq__", [](const Program& a, const Program& b) { return a == b; }, py::is_operator())
      .def(
          "validate",
          [](const Program& program, int32_t operand_count) {
            check(validate(program, operand_count));
          },
          "operand_count"_a)
      .def("canonicalise", &canonicalise, py::call_guard<py::gil_scoped_release>())
      .def("run", &run_host, "value"_a, "operands"_a)
      .def("vjp", &vjp_host, "value"_a, "operands"_a, "grad"_a);
}

}  // namespace cutfuse::bindings
