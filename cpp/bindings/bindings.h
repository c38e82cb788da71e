/// \file
/// What the files of the binding share: Status to exception, Python sequences to arrays.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <exception>
#include <vector>

#include "cutfuse/status.h"

namespace cutfuse::bindings {

/// Raises the Python exception that a code stands for, unless `status` is ok. Needs the GIL.
void check(const Status& status);

/// None if ok, the text if no kernel of this build takes the problem; raises for any other code.
pybind11::object reason(const Status& status);

/// What a call of Python's C interface made; throws the error that it raised in place of it.
inline pybind11::object checked(PyObject* made) {
  if (made == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(made);
}

/// What `call` returns, or null with the Python error that an exception stands for: for functions
/// that Python calls without pybind11.
template <class Call>
PyObject* translated(const Call& call) noexcept {
  try {
    return call();
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (const pybind11::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

/// A Python sequence of numbers called `name`: read in place if it is a list or a tuple, else
/// copied once. TypeError names what is not a number.
class Numbers {
 public:
  Numbers(const pybind11::handle& sequence, const char* name);

  Py_ssize_t size() const { return PySequence_Fast_GET_SIZE(fast_.ptr()); }
  int64_t integer(Py_ssize_t i) const;
  double real(Py_ssize_t i) const;
  std::vector<int64_t> integers() const;
  std::vector<double> reals() const;

 private:
  PyObject* item(Py_ssize_t i) const { return PySequence_Fast_GET_ITEM(fast_.ptr(), i); }
  [[noreturn]] void fail(Py_ssize_t i, const char* wanted) const;

  const char* name_;
  pybind11::object fast_;
};

/// The pointer that tensor.data_ptr() gave.
template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void add_version(pybind11::module_& module);
void add_device(pybind11::module_& module);
void add_program(pybind11::module_& module);
void add_gemm(pybind11::module_& module);
void add_fused(pybind11::module_& module);
void add_launch(pybind11::module_& module);
void add_replay(pybind11::module_& module);
void add_conv(pybind11::module_& module);
void add_split(pybind11::module_& module);
void add_row_reduce(pybind11::module_& module);

}  // namespace cutfuse::bindings
