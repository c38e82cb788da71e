/// \file
/// A planned call of a module, made again without Python code while nothing that it read has
/// changed. Of LinearScaleBatchNorm1d a call took 20.2 to 23.2 us with that code, 18.1 without, and
/// 30.5 to 34.4 and 27.6 where autograd recorded it (H200).
#include <array>

#include "bindings/bindings.h"
#include "cutfuse/program.h"

namespace py = pybind11;

namespace cutfuse::bindings {
namespace {

/// Positions in the tuple that a replay keeps: the garbage collector sees through a tuple, and the
/// dictionaries in it own the replay.
enum Part : Py_ssize_t {
  kModule,     // whose call it is: a copy of a module may share its memo
  kItems,      // dictionary, key and object in turn; the object is ... where there must be none
  kEmpties,    // containers
  kCalls,      // callable, arguments and result in turn
  kSources,    // of each tensor: None (the argument), (dictionary, key), or what stands for None
  kCheck,      // of the tensors
  kRawStream,  // of kDevice, a device
  kDevice,
  kOrder,  // of planes, words, device and stream, or None
  kWords,
  kBlank,  // of kOut and of kSave: shape, strides, dtype
  kOut,
  kSave,  // or None: mean and 1 / std of the batch then go to the workspace, at kMomentsAt
  kAllocate,
  kRelease,
  kWorkspaceBytes,
  kMomentsAt,  // or None: there are none
  kRun,        // of `bind`
  kMomentum,
  kEps,
  kPromotion,
  kApply,     // of an autograd function, or None
  kSettings,  // its second argument, after [out, save]
  kRecorded,  // which tensors are the others, -1 for None
  kParts
};

constexpr Py_ssize_t kPlanes = 2;  // position of a frozen weight's planes
constexpr Py_ssize_t kMostTensors = 3 + 2 * kMaxSteps + 5;

template <class... Arguments>
py::object call(PyObject* callable, Arguments... arguments) {
  const std::array<PyObject*, sizeof...(arguments)> given{arguments...};
  return checked(PyObject_Vectorcall(callable, given.data(), given.size(), nullptr));
}

py::object call_tuple(PyObject* callable, PyObject* arguments) {
  return checked(PyObject_Vectorcall(callable, &PyTuple_GET_ITEM(arguments, 0),
                                     PyTuple_GET_SIZE(arguments), nullptr));
}

/// What a dictionary holds, borrowed, or null.
PyObject* find(PyObject* dictionary, PyObject* key) {
  PyObject* found = PyDict_GetItemWithError(dictionary, key);
  if (found == nullptr && PyErr_Occurred()) throw py::error_already_set();
  return found;
}

/// The tensors of one call, owned while it lasts.
class Tensors {
 public:
  Tensors() = default;
  Tensors(const Tensors&) = delete;
  Tensors& operator=(const Tensors&) = delete;
  ~Tensors() {
    for (Py_ssize_t i = 0; i < count_; ++i) Py_DECREF(values_[i]);
  }

  /// False if one is missing.
  bool read(PyObject* sources, PyObject* x) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sources); ++i) {
      PyObject* value = PyTuple_GET_ITEM(sources, i);
      if (value == Py_None) {
        value = x;
      } else if (PyTuple_CheckExact(value)) {
        value = find(PyTuple_GET_ITEM(value, 0), PyTuple_GET_ITEM(value, 1));
        if (value == nullptr) return false;
      }
      Py_INCREF(value);
      values_[count_++] = value;
    }
    return true;
  }

  PyObject* operator[](Py_ssize_t i) const { return values_[i]; }
  PyObject* const* data() const { return values_; }
  Py_ssize_t size() const { return count_; }

 private:
  PyObject* values_[kMostTensors];
  Py_ssize_t count_ = 0;
};

/// Whether all that decided on the call is as it was, its tensors' contents apart.
bool is_as_it_was(PyObject* parts) {
  PyObject* items = PyTuple_GET_ITEM(parts, kItems);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items); i += 3) {
    PyObject* found = find(PyTuple_GET_ITEM(items, i), PyTuple_GET_ITEM(items, i + 1));
    if ((found != nullptr ? found : Py_Ellipsis) != PyTuple_GET_ITEM(items, i + 2)) return false;
  }
  PyObject* empties = PyTuple_GET_ITEM(parts, kEmpties);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(empties); ++i) {
    const Py_ssize_t size = PyObject_Size(PyTuple_GET_ITEM(empties, i));
    if (size < 0) throw py::error_already_set();
    if (size != 0) return false;
  }
  PyObject* calls = PyTuple_GET_ITEM(parts, kCalls);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(calls); i += 3) {
    const py::object found = call_tuple(PyTuple_GET_ITEM(calls, i), PyTuple_GET_ITEM(calls, i + 1));
    const int same = PyObject_RichCompareBool(found.ptr(), PyTuple_GET_ITEM(calls, i + 2), Py_EQ);
    if (same < 0) throw py::error_already_set();
    if (same == 0) return false;
  }
  return true;
}

/// Memory of a launch, given back as soon as the launch is queued.
class Workspace {
 public:
  Workspace(PyObject* parts, PyObject* stream) : release_(PyTuple_GET_ITEM(parts, kRelease)) {
    PyObject* bytes = PyTuple_GET_ITEM(parts, kWorkspaceBytes);
    if (PyObject_IsTrue(bytes) == 1) {
      address_ = call(PyTuple_GET_ITEM(parts, kAllocate), bytes, stream);
    }
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() {
    if (!address_) return;
    const py::error_scope kept;  // a failed launch says why
    if (PyObject* done = PyObject_CallOneArg(release_, address_.ptr()); done != nullptr) {
      Py_DECREF(done);
    } else {
      PyErr_WriteUnraisable(release_);
    }
  }

  /// None without memory.
  py::object at(PyObject* offset) const {
    if (!address_) return py::none();
    return checked(PyNumber_Add(address_.ptr(), offset));
  }
  py::object begin() const { return address_ ? address_ : py::none(); }

 private:
  PyObject* release_;
  py::object address_;
};

/// `apply([out, save], settings, *recorded)`.
py::object record(PyObject* parts, const Tensors& tensors, const py::object& out,
                  const py::object& save) {
  const py::object made = checked(PyList_New(2));
  PyList_SET_ITEM(made.ptr(), 0, out.inc_ref().ptr());
  PyList_SET_ITEM(made.ptr(), 1, save.inc_ref().ptr());
  PyObject* recorded = PyTuple_GET_ITEM(parts, kRecorded);
  PyObject* given[2 + kMostTensors] = {made.ptr(), PyTuple_GET_ITEM(parts, kSettings)};
  const Py_ssize_t count = PyTuple_GET_SIZE(recorded);
  for (Py_ssize_t i = 0; i < count; ++i) {
    const auto at = PyLong_AsSsize_t(PyTuple_GET_ITEM(recorded, i));
    given[2 + i] = at < 0 ? Py_None : tensors[at];
  }
  return checked(PyObject_Vectorcall(PyTuple_GET_ITEM(parts, kApply), given, 2 + count, nullptr));
}

py::object again(PyObject* parts, PyObject* x) {
  const auto part = [parts](Part at) { return PyTuple_GET_ITEM(parts, at); };
  Tensors tensors;
  if (!is_as_it_was(parts) || !tensors.read(part(kSources), x)) return py::none();
  const auto same =
      checked(PyObject_Vectorcall(part(kCheck), tensors.data(), tensors.size(), nullptr));
  if (same.ptr() != Py_True) return py::none();

  const auto list = checked(PyTuple_New(tensors.size()));
  for (Py_ssize_t i = 0; i < tensors.size(); ++i) {
    Py_INCREF(tensors[i]);
    PyTuple_SET_ITEM(list.ptr(), i, tensors[i]);
  }
  const py::object stream = call(part(kRawStream), part(kDevice));
  if (part(kOrder) != Py_None) {
    call(part(kOrder), tensors[kPlanes], part(kWords), part(kDevice), stream.ptr());
  }
  const py::object out = call_tuple(part(kBlank), part(kOut));
  py::object save = py::none();
  if (part(kSave) != Py_None) save = call_tuple(part(kBlank), part(kSave));
  {
    const Workspace workspace(parts, stream.ptr());
    py::object saved = save;
    if (save.is_none() && part(kMomentsAt) != Py_None) saved = workspace.at(part(kMomentsAt));
    call(part(kRun), out.ptr(), saved.ptr(), workspace.begin().ptr(), part(kWords), part(kMomentum),
         part(kEps), part(kPromotion), stream.ptr(), list.ptr());
  }
  return part(kApply) == Py_None ? out : record(parts, tensors, out, save);
}

PyObject* run_replay(PyObject* parts, PyObject* const* given, Py_ssize_t count) noexcept {
  return translated([&] {
    if (count != 2) throw py::type_error("a replay takes a module and its argument");
    const bool own = given[0] == PyTuple_GET_ITEM(parts, kModule);
    return (own ? again(parts, given[1]) : py::none()).release().ptr();
  });
}

PyMethodDef method = {"replay",
                      reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&run_replay)),
                      METH_FASTCALL, "The module's result for x; None if it is not as it was."};

/// Raises TypeError unless `parts` can be read as Part says.
void check_parts(const py::tuple& parts) {
  const auto fits = [&parts](Part at, Py_ssize_t step) {
    return PyTuple_CheckExact(parts[at].ptr()) && PyTuple_GET_SIZE(parts[at].ptr()) % step == 0;
  };
  bool right = parts.size() == kParts;
  right = right && fits(kItems, 3) && fits(kEmpties, 1) && fits(kCalls, 3) && fits(kSources, 1) &&
          fits(kRecorded, 1) && fits(kOut, 1) && (parts[kSave].is_none() || fits(kSave, 1));
  const auto tuple = [&parts](Part at) { return parts[at].cast<py::tuple>(); };
  for (size_t i = 0; right && i < tuple(kItems).size(); i += 3) {
    right = PyDict_Check(tuple(kItems)[i].ptr());
  }
  for (size_t i = 0; right && i < tuple(kCalls).size(); i += 3) {
    right = PyTuple_CheckExact(tuple(kCalls)[i + 1].ptr());
  }
  right = right && tuple(kSources).size() > kPlanes && tuple(kSources).size() <= kMostTensors &&
          tuple(kRecorded).size() <= kMostTensors;
  for (size_t i = 0; right && i < tuple(kSources).size(); ++i) {
    const py::object source = tuple(kSources)[i];
    if (!PyTuple_CheckExact(source.ptr())) continue;
    right = PyTuple_GET_SIZE(source.ptr()) == 2 && PyDict_Check(PyTuple_GET_ITEM(source.ptr(), 0));
  }
  for (size_t i = 0; right && i < tuple(kRecorded).size(); ++i) {
    const py::object at = tuple(kRecorded)[i];
    right = PyLong_Check(at.ptr()) && at.cast<Py_ssize_t>() < Py_ssize_t(tuple(kSources).size());
  }
  if (!right) throw py::type_error("a replay is made of other parts: pycutfuse/ops/_replay.py");
}

py::object make_replay(const py::tuple& parts) {
  check_parts(parts);
  const py::tuple kept = checked(PyTuple_GetSlice(parts.ptr(), 0, kParts));  // of no subclass
  return checked(PyCFunction_New(&method, kept.ptr()));
}

}  // namespace

void add_replay(py::module_& module) {
  using namespace py::literals;
  module.def("replay", &make_replay, "parts"_a);
}

}  // namespace cutfuse::bindings
