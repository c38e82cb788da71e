#include "cutfuse/fused.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace cutfuse::bindings {
namespace {

struct PlanDeleter {
  void operator()(Plan* plan) const { destroy_plan(plan); }
};
using PlanHandle = std::unique_ptr<Plan, PlanDeleter>;

FusedProblem make_problem(int64_t m, int64_t n, int64_t k, const Program& program, int32_t tail,
                          const Program& after, bool weight_planes) {
  FusedProblem problem;
  problem.gemm.m = m;
  problem.gemm.n = n;
  problem.gemm.k = k;
  problem.program = program;
  problem.tail = static_cast<Tail>(tail);
  problem.after = after;
  problem.weight_planes = weight_planes;
  return problem;
}

py::object why_not_fused(int64_t m, int64_t n, int64_t k, const Program& program, int32_t tail,
                         const Program& after, const DeviceProps& device) {
  Status status;
  {
    const py::gil_scoped_release release;
    status = why_not(make_problem(m, n, k, program, tail, after, false), device);
  }
  return reason(status);
}

PlanHandle make(int64_t m, int64_t n, int64_t k, const Program& program, int32_t tail,
                const Program& after, bool weight_planes, const DeviceProps& device,
                const std::optional<GemmPolicy>& policy) {
  Plan* plan = nullptr;
  Status status;
  {
    const py::gil_scoped_release release;
    status = make_plan(make_problem(m, n, k, program, tail, after, weight_planes), device,
                       policy ? &*policy : nullptr, &plan);
  }
  check(status);
  return PlanHandle(plan);
}

// Fixed room for the operands of one program: more than kMaxSteps cannot all be read.
struct OperandList {
  Operand values[kMaxSteps];
  int32_t count = 0;

  OperandList(const py::handle& sequence, const char* name) {
    const Numbers numbers(sequence, name);
    if (numbers.size() % 3 != 0 || numbers.size() > 3 * kMaxSteps) {
      throw py::value_error(std::string(name) + " has " + std::to_string(numbers.size()) +
                            " numbers; it must have pointer, row stride and column stride of at "
                            "most " +
                            std::to_string(kMaxSteps) + " operands");
    }
    for (Py_ssize_t i = 0; i < numbers.size(); i += 3) {
      values[count++] = {pointer<const float>(numbers.integer(i)), numbers.integer(i + 1),
                         numbers.integer(i + 2)};
    }
  }
};

BatchNormBuffers batch_norm_buffers(const py::object& pointers, double momentum, double eps) {
  BatchNormBuffers buffers;
  buffers.momentum = momentum;
  buffers.eps = eps;
  if (pointers.is_none()) return buffers;
  const Numbers at(pointers, "batch_norm");
  if (at.size() != 7) {
    throw py::value_error("batch_norm has " + std::to_string(at.size()) +
                          " pointers; it must have 7: weight, bias, running_mean, running_var, "
                          "num_batches_tracked, save_mean, save_invstd");
  }
  buffers.weight = pointer<const float>(at.integer(0));
  buffers.bias = pointer<const float>(at.integer(1));
  buffers.running_mean = pointer<float>(at.integer(2));
  buffers.running_var = pointer<float>(at.integer(3));
  buffers.num_batches_tracked = pointer<int64_t>(at.integer(4));
  buffers.save_mean = pointer<float>(at.integer(5));
  buffers.save_invstd = pointer<float>(at.integer(6));
  return buffers;
}

void run_plan(const Plan& plan, uintptr_t x, int64_t x_row_stride, int64_t x_col_stride,
              uintptr_t weight, int64_t weight_row_stride, int64_t weight_col_stride,
              uintptr_t weight_planes, uintptr_t weight_words, const py::object& operands,
              const py::object& after_operands, uintptr_t out, int64_t out_row_stride,
              const py::object& batch_norm, double momentum, double eps, uintptr_t workspace,
              double promotion, uintptr_t stream) {
  const OperandList first(operands, "operands");
  const OperandList second(after_operands, "after_operands");
  FusedBuffers buffers;
  buffers.x = {pointer<const float>(x), x_row_stride, x_col_stride};
  buffers.weight = {pointer<const float>(weight), weight_row_stride, weight_col_stride};
  buffers.weight_planes = pointer<const void>(weight_planes);
  buffers.weight_words = pointer<const int32_t>(weight_words);
  buffers.operands = first.values;
  buffers.operand_count = first.count;
  buffers.after_operands = second.values;
  buffers.after_operand_count = second.count;
  buffers.out = {pointer<float>(out), out_row_stride};
  buffers.batch_norm = batch_norm_buffers(batch_norm, momentum, eps);
  buffers.workspace = pointer<void>(workspace);
  buffers.promotion = static_cast<float>(promotion);
  Status status;
  {
    const py::gil_scoped_release release;
    status = run(plan, buffers, pointer<void>(stream));
  }
  check(status);
}

py::dict tail_codes() {
  using namespace py::literals;
  return py::dict("none"_a = static_cast<int32_t>(Tail::kNone),
                  "batch_norm_train"_a = static_cast<int32_t>(Tail::kBatchNormTrain),
                  "batch_norm_eval"_a = static_cast<int32_t>(Tail::kBatchNormEval));
}

}  // namespace

void add_fused(py::module_& module) {
  using namespace py::literals;
  module.attr("TAILS") = tail_codes();
  py::class_<Plan, PlanHandle>(module, "Plan", "A plan for one problem on one device; immutable.")
      .def_property_readonly("workspace_bytes", &Plan::workspace_bytes)
      .def_property_readonly("policy", &Plan::policy, py::return_value_policy::copy)
      .def("describe", &Plan::describe, py::call_guard<py::gil_scoped_release>());
  module.def("why_not", &why_not_fused, "m"_a, "n"_a, "k"_a, "program"_a, "tail"_a, "after"_a,
             "device"_a);
  module.def("make_plan", &make, "m"_a, "n"_a, "k"_a, "program"_a, "tail"_a, "after"_a,
             "weight_planes"_a, "device"_a, "policy"_a = py::none());
  module.def("run", &run_plan, "plan"_a, "x"_a, "x_row_stride"_a, "x_col_stride"_a, "weight"_a,
             "weight_row_stride"_a, "weight_col_stride"_a, "weight_planes"_a, "weight_words"_a,
             "operands"_a, "after_operands"_a, "out"_a, "out_row_stride"_a, "batch_norm"_a,
             "momentum"_a, "eps"_a, "workspace"_a, "promotion"_a, "stream"_a);
}

}  // namespace cutfuse::bindings
