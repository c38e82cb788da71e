#include <string>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace cutfuse::bindings {

Numbers::Numbers(const py::handle& sequence, const char* name) : name_(name) {
  const bool is_text = PyUnicode_Check(sequence.ptr()) || PyBytes_Check(sequence.ptr());
  if (is_text || !PySequence_Check(sequence.ptr())) {
    throw py::type_error(std::string(name) + " is a " + Py_TYPE(sequence.ptr())->tp_name +
                         "; it must be a sequence of numbers");
  }
  fast_ = checked(PySequence_Fast(sequence.ptr(), name));
}

int64_t Numbers::integer(Py_ssize_t i) const {
  if (!PyIndex_Check(item(i))) fail(i, "an int");
  const int64_t value = PyLong_AsLongLong(item(i));
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

double Numbers::real(Py_ssize_t i) const {
  if (!PyNumber_Check(item(i))) fail(i, "a number");
  const double value = PyFloat_AsDouble(item(i));
  if (value == -1.0 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

std::vector<int64_t> Numbers::integers() const {
  std::vector<int64_t> values(static_cast<size_t>(size()));
  for (Py_ssize_t i = 0; i < size(); ++i) values[static_cast<size_t>(i)] = integer(i);
  return values;
}

std::vector<double> Numbers::reals() const {
  std::vector<double> values(static_cast<size_t>(size()));
  for (Py_ssize_t i = 0; i < size(); ++i) values[static_cast<size_t>(i)] = real(i);
  return values;
}

void Numbers::fail(Py_ssize_t i, const char* wanted) const {
  throw py::type_error(std::string(name_) + "[" + std::to_string(i) + "] is a " +
                       Py_TYPE(item(i))->tp_name + "; it must be " + wanted);
}

}  // namespace cutfuse::bindings
