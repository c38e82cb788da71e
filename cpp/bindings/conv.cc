#include "cutfuse/conv.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/buffers.h"

namespace py = pybind11;

namespace cutfuse::bindings {
namespace {

struct PlanDeleter {
  void operator()(ConvPlan* plan) const { destroy_conv_plan(plan); }
};
using PlanHandle = std::unique_ptr<ConvPlan, PlanDeleter>;

FusedConvProblem make_problem(int64_t batch, int64_t channels, int64_t height, int64_t width,
                              int64_t out_channels, int64_t kernel_h, int64_t kernel_w,
                              int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w,
                              int64_t dilation_h, int64_t dilation_w, int64_t groups, int64_t out_h,
                              int64_t out_w, bool transposed, const Program& program, int32_t tail,
                              const Program& after, int32_t precision, int32_t dtype,
                              bool packed_weight, bool channels_last, int64_t pixel_stride) {
  FusedConvProblem problem;
  problem.conv = {batch,
                  channels,
                  height,
                  width,
                  out_channels,
                  kernel_h,
                  kernel_w,
                  stride_h,
                  stride_w,
                  pad_h,
                  pad_w,
                  dilation_h,
                  dilation_w,
                  groups,
                  out_h,
                  out_w,
                  transposed,
                  static_cast<Precision>(precision),
                  static_cast<DType>(dtype)};
  problem.program = program;
  problem.tail = static_cast<Tail>(tail);
  problem.after = after;
  problem.packed_weight = packed_weight;
  problem.channels_last = channels_last;
  problem.pixel_stride = pixel_stride;
  return problem;
}

py::object why_not_conv(const FusedConvProblem& problem, const DeviceProps& device) {
  return reason(without_gil([&] { return why_not(problem, device); }));
}

py::object why_slower_conv(const FusedConvProblem& problem, const DeviceProps& device) {
  return reason(without_gil([&] { return why_slower(problem, device); }));
}

PlanHandle make(const FusedConvProblem& problem, const DeviceProps& device,
                const std::optional<ConvPolicy>& policy) {
  ConvPlan* plan = nullptr;
  check(without_gil(
      [&] { return make_conv_plan(problem, device, policy ? &*policy : nullptr, &plan); }));
  return PlanHandle(plan);
}

ConvPolicy make_policy(int32_t tile_n, int32_t planes, int32_t element, int32_t m_blocks,
                       int32_t strip, int32_t chunk, int32_t stages, const GemmPolicy& gemm,
                       int32_t direct, int32_t patch_n) {
  return {tile_n, planes, static_cast<DType>(element), m_blocks, strip, chunk,
          stages, gemm,   static_cast<Direct>(direct), patch_n};
}

py::list policy_list() {
  std::vector<ConvPolicy> policies(
      static_cast<size_t>(compiled_policies(static_cast<ConvPolicy*>(nullptr), 0)));
  compiled_policies(policies.data(), static_cast<int32_t>(policies.size()));
  py::list list;
  for (const ConvPolicy& policy : policies) list.append(policy);
  return list;
}

ConstTensor4 tensor(uintptr_t data, const py::object& strides, const char* name) {
  const Numbers numbers(strides, name);
  if (numbers.size() != 4) {
    throw py::value_error(std::string(name) + " has " + std::to_string(numbers.size()) +
                          " numbers; it must have 4");
  }
  ConstTensor4 made;
  made.data = pointer<const void>(data);
  for (Py_ssize_t i = 0; i < 4; ++i) made.strides[i] = numbers.integer(i);
  return made;
}

void pack_weight(const ConvPlan& plan, uintptr_t weight, const py::object& weight_strides,
                 uintptr_t packed, uintptr_t stream) {
  const ConstTensor4 from = tensor(weight, weight_strides, "weight_strides");
  check(
      without_gil([&] { return pack(plan, from, pointer<void>(packed), pointer<void>(stream)); }));
}

void run_plan(const ConvPlan& plan, uintptr_t x, const py::object& x_strides, uintptr_t weight,
              const py::object& weight_strides, uintptr_t packed, const py::object& operands,
              const py::object& after_operands, uintptr_t out, const py::object& batch_norm,
              double momentum, double eps, uintptr_t workspace, double promotion,
              uintptr_t stream) {
  const OperandList first(operands, "operands");
  const OperandList second(after_operands, "after_operands");
  ConvBuffers buffers;
  buffers.x = tensor(x, x_strides, "x_strides");
  buffers.weight = tensor(weight, weight_strides, "weight_strides");
  buffers.packed = pointer<const void>(packed);
  buffers.operands = first.values;
  buffers.operand_count = first.count;
  buffers.after_operands = second.values;
  buffers.after_operand_count = second.count;
  buffers.out = pointer<void>(out);
  buffers.batch_norm = batch_norm_buffers(batch_norm, momentum, eps);
  buffers.workspace = pointer<void>(workspace);
  buffers.promotion = static_cast<float>(promotion);
  check(without_gil([&] { return run(plan, buffers, pointer<void>(stream)); }));
}

}  // namespace

void add_conv(py::module_& module) {
  using namespace py::literals;
  py::class_<ConvPolicy>(module, "ConvPolicy")
      .def(py::init(&make_policy), "tile_n"_a, "planes"_a = 1, "element"_a = 1, "m_blocks"_a = 1,
           "strip"_a = 0, "chunk"_a = 0, "stages"_a = 2, "gemm"_a = GemmPolicy{}, "direct"_a = 0,
           "patch_n"_a = 0)
      .def_readwrite("tile_n", &ConvPolicy::tile_n)
      .def_readwrite("planes", &ConvPolicy::planes)
      .def_property(
          "element", [](const ConvPolicy& policy) { return static_cast<int32_t>(policy.element); },
          [](ConvPolicy& policy, int32_t element) { policy.element = static_cast<DType>(element); })
      .def_readwrite("m_blocks", &ConvPolicy::m_blocks)
      .def_readwrite("strip", &ConvPolicy::strip)
      .def_readwrite("chunk", &ConvPolicy::chunk)
      .def_readwrite("stages", &ConvPolicy::stages)
      .def_readwrite("gemm", &ConvPolicy::gemm)
      .def_property(
          "direct", [](const ConvPolicy& policy) { return static_cast<int32_t>(policy.direct); },
          [](ConvPolicy& policy, int32_t direct) { policy.direct = static_cast<Direct>(direct); })
      .def_readwrite("patch_n", &ConvPolicy::patch_n)
      .def(
          "__eq__", [](const ConvPolicy& a, const ConvPolicy& b) { return a == b; },
          py::is_operator())
      .def("__repr__", [](const ConvPolicy& policy) { return to_string(policy); });
  py::class_<FusedConvProblem>(module, "ConvProblem",
                               "One convolution with its programs and tail; immutable.")
      .def(py::init(&make_problem), "batch"_a, "channels"_a, "height"_a, "width"_a,
           "out_channels"_a, "kernel_h"_a, "kernel_w"_a, "stride_h"_a, "stride_w"_a, "pad_h"_a,
           "pad_w"_a, "dilation_h"_a, "dilation_w"_a, "groups"_a, "out_h"_a, "out_w"_a,
           "transposed"_a, "program"_a, "tail"_a, "after"_a, "precision"_a, "dtype"_a,
           "packed_weight"_a = false, "channels_last"_a = false, "pixel_stride"_a = 0);
  py::class_<ConvPlan, PlanHandle>(module, "ConvPlan", "A plan of a convolution; immutable.")
      .def_property_readonly("workspace_bytes", &ConvPlan::workspace_bytes)
      .def_property_readonly("packed_bytes", &ConvPlan::packed_bytes)
      .def_property_readonly("packed_key", &ConvPlan::packed_key)
      .def_property_readonly("policy", &ConvPlan::policy, py::return_value_policy::copy)
      .def("describe", &ConvPlan::describe, py::call_guard<py::gil_scoped_release>());
  module.def("compiled_conv_policies", &policy_list);
  module.def("conv_why_not", &why_not_conv, "problem"_a, "device"_a);
  module.def("conv_why_slower", &why_slower_conv, "problem"_a, "device"_a);
  module.def("make_conv_plan", &make, "problem"_a, "device"_a, "policy"_a = py::none());
  module.def("pack_conv_weight", &pack_weight, "plan"_a, "weight"_a, "weight_strides"_a, "packed"_a,
             "stream"_a);
  module.def("run_conv", &run_plan, "plan"_a, "x"_a, "x_strides"_a, "weight"_a, "weight_strides"_a,
             "packed"_a, "operands"_a, "after_operands"_a, "out"_a, "batch_norm"_a, "momentum"_a,
             "eps"_a, "workspace"_a, "promotion"_a, "stream"_a);
}

}  // namespace cutfuse::bindings
