#include "cutfuse/fused.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>

#include "bindings/bindings.h"
#include "bindings/buffers.h"

namespace py = pybind11;

namespace cutfuse::bindings {
namespace {

struct PlanDeleter {
  void operator()(Plan* plan) const { destroy_plan(plan); }
  void operator()(ChainPlan* plan) const { destroy_chain(plan); }
};
using PlanHandle = std::unique_ptr<Plan, PlanDeleter>;
using ChainHandle = std::unique_ptr<ChainPlan, PlanDeleter>;

FusedProblem make_problem(int64_t m, int64_t n, int64_t k, const Program& program, int32_t tail,
                          const Program& after, int32_t precision, int32_t dtype,
                          bool weight_planes, int64_t x_leading, int64_t weight_leading) {
  FusedProblem problem;
  problem.gemm.m = m;
  problem.gemm.n = n;
  problem.gemm.k = k;
  problem.gemm.precision = static_cast<Precision>(precision);
  problem.gemm.dtype = static_cast<DType>(dtype);
  problem.program = program;
  problem.tail = static_cast<Tail>(tail);
  problem.after = after;
  problem.weight_planes = weight_planes;
  problem.x_leading = x_leading;
  problem.weight_leading = weight_leading;
  return problem;
}

py::object why_not_fused(const FusedProblem& problem, const DeviceProps& device) {
  return reason(without_gil([&] { return why_not(problem, device); }));
}

py::object why_slower_here(const FusedProblem& problem, const DeviceProps& device) {
  return reason(without_gil([&] { return why_slower(problem, device); }));
}

py::object why_not_chain(const FusedProblem& first, const FusedProblem& second,
                         const DeviceProps& device) {
  return reason(without_gil([&] { return why_not(ChainProblem{first, second}, device); }));
}

PlanHandle make(const FusedProblem& problem, const DeviceProps& device,
                const std::optional<GemmPolicy>& policy) {
  Plan* plan = nullptr;
  check(
      without_gil([&] { return make_plan(problem, device, policy ? &*policy : nullptr, &plan); }));
  return PlanHandle(plan);
}

ChainHandle make_chain_plan(const FusedProblem& first, const FusedProblem& second,
                            const DeviceProps& device) {
  ChainPlan* plan = nullptr;
  check(without_gil([&] { return make_chain({first, second}, device, &plan); }));
  return ChainHandle(plan);
}

/// pointer, row stride, column stride, planes, words
ConstMatrix weight_of(const py::object& sequence, DType dtype, FusedBuffers* buffers) {
  const Numbers numbers(sequence, "weight");
  if (numbers.size() != 5) {
    throw py::value_error("a weight has " + std::to_string(numbers.size()) +
                          " numbers; it must have 5: pointer, row stride, column stride, planes, "
                          "words");
  }
  buffers->weight_planes = pointer<const void>(numbers.integer(3));
  buffers->weight_words = pointer<const int32_t>(numbers.integer(4));
  return {pointer<const void>(numbers.integer(0)), numbers.integer(1), numbers.integer(2), dtype};
}

void run_chain(const ChainPlan& plan, int32_t dtype, uintptr_t x, int64_t x_row_stride,
               int64_t x_col_stride, const py::object& first_weight,
               const py::object& second_weight, const py::object& first_operands,
               const py::object& second_operands, uintptr_t out, int64_t out_row_stride,
               uintptr_t workspace, double promotion, uintptr_t stream) {
  const OperandList first(first_operands, "first_operands");
  const OperandList second(second_operands, "second_operands");
  const auto type = static_cast<DType>(dtype);
  ChainBuffers buffers;
  buffers.first.x = {pointer<const void>(x), x_row_stride, x_col_stride, type};
  buffers.first.weight = weight_of(first_weight, type, &buffers.first);
  buffers.first.operands = first.values;
  buffers.first.operand_count = first.count;
  buffers.second.weight = weight_of(second_weight, type, &buffers.second);
  buffers.second.operands = second.values;
  buffers.second.operand_count = second.count;
  buffers.second.out = {pointer<void>(out), out_row_stride, type};
  buffers.workspace = pointer<void>(workspace);
  buffers.first.promotion = buffers.second.promotion = static_cast<float>(promotion);
  check(without_gil([&] { return run(plan, buffers, pointer<void>(stream)); }));
}

py::dict tail_codes() {
  using namespace py::literals;
  return py::dict("none"_a = static_cast<int32_t>(Tail::kNone),
                  "batch_norm_train"_a = static_cast<int32_t>(Tail::kBatchNormTrain),
                  "batch_norm_eval"_a = static_cast<int32_t>(Tail::kBatchNormEval),
                  "logsumexp"_a = static_cast<int32_t>(Tail::kLogSumExp));
}

}  // namespace

void add_fused(py::module_& module) {
  using namespace py::literals;
  module.attr("TAILS") = tail_codes();
  py::class_<FusedProblem>(module, "FusedProblem",
                           "One contraction with its programs and tail; immutable.")
      .def(py::init(&make_problem), "m"_a, "n"_a, "k"_a, "program"_a, "tail"_a, "after"_a,
           "precision"_a, "dtype"_a, "weight_planes"_a = false, "x_leading"_a = 0,
           "weight_leading"_a = 0);
  py::class_<Plan, PlanHandle>(module, "Plan", "A plan for one problem on one device; immutable.")
      .def_property_readonly("workspace_bytes", &Plan::workspace_bytes)
      .def_property_readonly("policy", &Plan::policy, py::return_value_policy::copy)
      .def("describe", &Plan::describe, py::call_guard<py::gil_scoped_release>());
  py::class_<ChainPlan, ChainHandle>(module, "ChainPlan", "Two contractions; immutable.")
      .def_property_readonly("workspace_bytes", &ChainPlan::workspace_bytes)
      .def("describe", &ChainPlan::describe, py::call_guard<py::gil_scoped_release>());
  module.def("why_not", &why_not_fused, "problem"_a, "device"_a);
  module.def("why_slower", &why_slower_here, "problem"_a, "device"_a);
  module.def("why_not_chain", &why_not_chain, "first"_a, "second"_a, "device"_a);
  module.def("make_plan", &make, "problem"_a, "device"_a, "policy"_a = py::none());
  module.def("make_chain", &make_chain_plan, "first"_a, "second"_a, "device"_a);
  module.def("run_chain", &run_chain, "plan"_a, "dtype"_a, "x"_a, "x_row_stride"_a,
             "x_col_stride"_a, "first_weight"_a, "second_weight"_a, "first_operands"_a,
             "second_operands"_a, "out"_a, "out_row_stride"_a, "workspace"_a, "promotion"_a,
             "stream"_a);
}

}  // namespace cutfuse::bindings
