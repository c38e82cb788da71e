#include "bindings/bindings.h"

namespace py = pybind11;

namespace cutfuse::bindings {
namespace {

PyObject* exception_type(Code code) {
  switch (code) {
    case Code::kInvalidValue:
      return PyExc_ValueError;
    case Code::kInvalidType:
      return PyExc_TypeError;
    case Code::kNotSupported:
      return PyExc_NotImplementedError;
    case Code::kOutOfMemory:
      return PyExc_MemoryError;
    case Code::kOk:
    case Code::kInvalidShape:
    case Code::kCuda:
    case Code::kInternal:
      break;
  }
  return PyExc_RuntimeError;
}

}  // namespace

void check(const Status& status) {
  if (status.ok()) return;
  PyErr_SetString(exception_type(status.code), status.message);
  throw py::error_already_set();
}

py::object reason(const Status& status) {
  if (status.code == Code::kNotSupported) return py::str(status.message);
  check(status);
  return py::none();
}

}  // namespace cutfuse::bindings
