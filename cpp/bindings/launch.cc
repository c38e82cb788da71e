/// \file
/// A plan bound to what stays the same from call to call. Of a launch with a batch norm, numbers
/// that Python gathers and pybind11 converts cost 2.1 us of host time; read here they cost 0.8.
#include <memory>
#include <string>

#include "bindings/bindings.h"
#include "bindings/buffers.h"
#include "cutfuse/fused.h"

namespace py = pybind11;

namespace cutfuse::bindings {
namespace {

constexpr const char* kName = "cutfuse.launch";

/// Positions of the arguments.
enum : Py_ssize_t {
  kOut,
  kSave,
  kWorkspace,
  kWords,
  kMomentum,
  kEps,
  kPromotion,
  kStream,
  kTensors,
  kCount
};

struct Launch {
  py::object owner;  // of `plan`
  const Plan* plan;
  FusedBuffers buffers;  // strides and dtypes
  OperandList operands;
  OperandList after_operands;
  bool normalises;
  py::str data_ptr;  // made once

  uintptr_t address(PyObject* value) const;
  void run(PyObject* const* given, Py_ssize_t count) const;
};

/// Of null (None), of a number, or of what a tensor's data_ptr() says.
uintptr_t Launch::address(PyObject* value) const {
  if (value == Py_None) return 0;
  py::object number;
  if (!PyLong_Check(value)) {
    number = checked(PyObject_CallMethodNoArgs(value, data_ptr.ptr()));
    value = number.ptr();
  }
  const auto found = static_cast<uintptr_t>(PyLong_AsUnsignedLongLong(value));
  if (found == static_cast<uintptr_t>(-1) && PyErr_Occurred()) throw py::error_already_set();
  return found;
}

double real(PyObject* value) {
  const double found = PyFloat_AsDouble(value);
  if (found == -1.0 && PyErr_Occurred()) throw py::error_already_set();
  return found;
}

void Launch::run(PyObject* const* given, Py_ssize_t count) const {
  if (count != kCount) {
    throw py::type_error("a launch takes " + std::to_string(kCount) + " arguments; it was given " +
                         std::to_string(count));
  }
  const auto tensors = checked(PySequence_Fast(given[kTensors], "tensors is no sequence"));
  const Py_ssize_t wanted = 3 + operands.count + (normalises ? 5 : 0) + after_operands.count;
  const Py_ssize_t found = PySequence_Fast_GET_SIZE(tensors.ptr());
  if (found != wanted) {
    throw py::value_error("a launch of this plan takes " + std::to_string(wanted) +
                          " tensors; it was given " + std::to_string(found));
  }
  PyObject* const* next = PySequence_Fast_ITEMS(tensors.ptr());
  FusedBuffers call = buffers;
  OperandList first = operands;
  OperandList second = after_operands;
  call.operands = first.values;
  call.after_operands = second.values;
  call.out.data = pointer<void>(address(given[kOut]));
  call.workspace = pointer<void>(address(given[kWorkspace]));
  call.promotion = static_cast<float>(real(given[kPromotion]));
  const auto stream = pointer<void>(address(given[kStream]));

  call.x.data = pointer<const void>(address(*next++));
  call.weight.data = pointer<const void>(address(*next++));
  const uintptr_t planes = address(*next++);
  if (plan->problem().weight_planes) {
    call.weight_planes = pointer<const void>(planes);
    call.weight_words = pointer<const int32_t>(address(given[kWords]));
  }
  for (int32_t i = 0; i < first.count; ++i) {
    first.values[i].data = pointer<const void>(address(*next++));
  }
  if (normalises) {
    BatchNormBuffers& norm = call.batch_norm;
    norm.weight = pointer<const void>(address(*next++));
    norm.bias = pointer<const void>(address(*next++));
    norm.running_mean = pointer<void>(address(*next++));
    norm.running_var = pointer<void>(address(*next++));
    norm.num_batches_tracked = pointer<int64_t>(address(*next++));
    norm.momentum = real(given[kMomentum]);
    norm.eps = real(given[kEps]);
    norm.save_mean = pointer<float>(address(given[kSave]));
    if (norm.save_mean != nullptr) norm.save_invstd = norm.save_mean + plan->problem().gemm.n;
  }
  for (int32_t i = 0; i < second.count; ++i) {
    second.values[i].data = pointer<const void>(address(*next++));
  }
  check(without_gil([&] { return cutfuse::run(*plan, call, stream); }));
}

PyObject* run_launch(PyObject* self, PyObject* const* given, Py_ssize_t count) noexcept {
  return translated([&] {
    static_cast<const Launch*>(PyCapsule_GetPointer(self, kName))->run(given, count);
    return py::none().release().ptr();
  });
}

PyMethodDef method = {"launch",
                      reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&run_launch)),
                      METH_FASTCALL, "Queue one call of a bound plan."};

void destroy_launch(PyObject* capsule) {
  delete static_cast<Launch*>(PyCapsule_GetPointer(capsule, kName));
}

py::object bind_plan(const py::object& plan, int64_t x_row_stride, int64_t x_col_stride,
                     int64_t weight_row_stride, int64_t weight_col_stride,
                     const py::object& operands, const py::object& after_operands,
                     int64_t out_row_stride, int32_t affine_dtype, int32_t running_dtype) {
  const auto* fused = plan.cast<const Plan*>();
  if (fused == nullptr) throw py::type_error("plan is None; it must be a Plan");
  const FusedProblem& problem = fused->problem();
  const DType dtype = problem.gemm.dtype;
  FusedBuffers buffers;
  buffers.x = {nullptr, x_row_stride, x_col_stride, dtype};
  buffers.weight = {nullptr, weight_row_stride, weight_col_stride, dtype};
  buffers.out = {nullptr, out_row_stride, dtype};
  buffers.batch_norm.affine_dtype = static_cast<DType>(affine_dtype);
  buffers.batch_norm.running_dtype = static_cast<DType>(running_dtype);
  const bool normalises =
      problem.tail == Tail::kBatchNormTrain || problem.tail == Tail::kBatchNormEval;
  auto made = std::unique_ptr<Launch>(
      new Launch{plan, fused, buffers, OperandList(operands, "operands"),
                 OperandList(after_operands, "after_operands"), normalises,
                 py::reinterpret_steal<py::str>(PyUnicode_InternFromString("data_ptr"))});
  made->buffers.operand_count = made->operands.count;
  made->buffers.after_operand_count = made->after_operands.count;
  const py::capsule self(made.get(), kName, &destroy_launch);
  (void)made.release();  // now the capsule's
  return checked(PyCFunction_New(&method, self.ptr()));
}

}  // namespace

void add_launch(py::module_& module) {
  using namespace py::literals;
  module.def("bind", &bind_plan, "plan"_a, "x_row_stride"_a, "x_col_stride"_a,
             "weight_row_stride"_a, "weight_col_stride"_a, "operands"_a, "after_operands"_a,
             "out_row_stride"_a, "affine_dtype"_a = 0, "running_dtype"_a = 0);
}

}  // namespace cutfuse::bindings
