#include "cutfuse/row_reduce.h"

#include "bindings/bindings.h"

namespace py = pybind11;

namespace cutfuse::bindings {
namespace {

LogSumExpPlan make_plan(const py::object& sizes, const py::object& strides, uint64_t reduced,
                        int32_t dtype, int32_t out_dtype, const DeviceProps& device) {
  const std::vector<int64_t> size = Numbers(sizes, "sizes").integers();
  const std::vector<int64_t> stride = Numbers(strides, "strides").integers();
  if (size.size() != stride.size()) {
    throw py::value_error("sizes and strides must have the same length");
  }
  LogSumExpProblem problem;
  problem.dim_count = static_cast<int32_t>(size.size());
  problem.sizes = size.data();
  problem.strides = stride.data();
  problem.reduced = reduced;
  problem.dtype = static_cast<DType>(dtype);
  problem.out_dtype = static_cast<DType>(out_dtype);
  LogSumExpPlan plan;
  check(plan_logsumexp(problem, device, &plan));
  return plan;
}

void run(const LogSumExpPlan& plan, uintptr_t x, uintptr_t out, uintptr_t workspace,
         uintptr_t stream) {
  Status status;
  {
    const py::gil_scoped_release release;
    status = logsumexp(plan, pointer<const void>(x), pointer<void>(out), pointer<void>(workspace),
                       pointer<void>(stream));
  }
  check(status);
}

void merge(uintptr_t partials, int64_t rows, int64_t count, uintptr_t out, int32_t out_dtype,
           const DeviceProps& device, uintptr_t stream) {
  Status status;
  {
    const py::gil_scoped_release release;
    status = merge_logsumexp_partials(pointer<const LogSumExpPartial>(partials), rows, count,
                                      pointer<void>(out), static_cast<DType>(out_dtype), device,
                                      pointer<void>(stream));
  }
  check(status);
}

}  // namespace

void add_row_reduce(py::module_& module) {
  using namespace py::literals;
  py::class_<LogSumExpPlan>(module, "LogSumExpPlan")
      .def_readonly("workspace_bytes", &LogSumExpPlan::workspace_bytes)
      .def_readonly("rows", &LogSumExpPlan::rows)
      .def_readonly("length", &LogSumExpPlan::length)
      .def_readonly("splits", &LogSumExpPlan::splits)
      .def("__repr__", [](const LogSumExpPlan& plan) { return to_string(plan); });
  module.def("plan_logsumexp", &make_plan, "sizes"_a, "strides"_a, "reduced"_a, "dtype"_a,
             "out_dtype"_a, "device"_a);
  module.def("logsumexp", &run, "plan"_a, "x"_a, "out"_a, "workspace"_a, "stream"_a);
  module.def("merge_logsumexp_partials", &merge, "partials"_a, "rows"_a, "count"_a, "out"_a,
             "out_dtype"_a, "device"_a, "stream"_a);
}

}  // namespace cutfuse::bindings
