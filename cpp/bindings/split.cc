#include "cutfuse/split.h"

#include "bindings/bindings.h"

namespace py = pybind11;

namespace cutfuse::bindings {
namespace {

py::tuple layout(int64_t rows, int64_t k, int32_t count) {
  PlanesLayout planes;
  check(planes_layout(rows, k, count, &planes));
  return py::make_tuple(planes.leading, planes.plane_bytes, planes.word_bytes);
}

void split_matrix(uintptr_t x, int64_t row_stride, int64_t col_stride, int64_t rows, int64_t k,
                  int32_t count, uintptr_t planes, uintptr_t words, const DeviceProps& device,
                  uintptr_t stream) {
  Status status;
  {
    const py::gil_scoped_release release;
    status = split({pointer<const float>(x), row_stride, col_stride}, rows, k, count,
                   pointer<void>(planes), pointer<int32_t>(words), device, pointer<void>(stream));
  }
  check(status);
}

}  // namespace

void add_split(py::module_& module) {
  using namespace py::literals;
  module.def("planes_layout", &layout, "rows"_a, "k"_a, "count"_a);
  module.def("split", &split_matrix, "x"_a, "row_stride"_a, "col_stride"_a, "rows"_a, "k"_a,
             "count"_a, "planes"_a, "words"_a, "device"_a, "stream"_a);
}

}  // namespace cutfuse::bindings
