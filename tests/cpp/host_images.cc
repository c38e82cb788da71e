// What the copy engine brings of images, by its rules and by what the library tells it.
#include <pybind11/pybind11.h>

#include <vector>

#include "gemm/images.h"

namespace py = pybind11;

namespace {

using cutfuse::gemm::Images;

Images images_of(const py::sequence& numbers) {
  std::vector<int32_t> n;
  for (const py::handle& number : numbers) n.push_back(number.cast<int32_t>());
  if (n.size() != 14) throw py::value_error("images have 14 numbers");
  return {n[0], n[1], n[2],  n[3],  n[4],  n[5],  n[6], n[7],
          n[8], n[9], n[10], n[11], n[12], n[13], 0,    false};
}

// Of the rows of a tile from `first_row` on, the pixels (image, h, w) that the engine reads at tap
// (r, s) of plane `plane`; None where it reads zeros.
py::list read_tile(const py::sequence& numbers, int32_t planes, int32_t first_row, int32_t rows,
                   int32_t plane, int32_t r, int32_t s) {
  const Images images = images_of(numbers);
  const cutfuse::ImageBoxes boxes =
      boxes_of(images, nullptr, planes, cutfuse::DType::kFloat16, rows);
  const cutfuse::gemm::FirstTap first = first_tap(images, first_row);
  int64_t image = plane * images.count + first.image, h = first.h, w = first.w;
  py::list read;
  for (int32_t row = 0; row < boxes.box_pixels; ++row) {
    const int64_t y = h + r * images.dilation_h;
    const int64_t x = w + s * images.dilation_w;
    const bool inside =
        image < boxes.images && y >= 0 && y < boxes.height && x >= 0 && x < boxes.width;
    read.append(inside ? py::object(py::make_tuple(image, y, x)) : py::object(py::none()));
    w += boxes.stride_w;
    if (w < boxes.width + boxes.upper_w) continue;
    w = boxes.lower_w;
    h += boxes.stride_h;
    if (h < boxes.height + boxes.upper_h) continue;
    h = boxes.lower_h;
    ++image;
  }
  return read;
}

int64_t place(const py::sequence& numbers, int32_t row, int32_t column, int32_t columns) {
  const Images images = images_of(numbers);
  return plane_pixel(images, row, columns).offset + int64_t(column) * images.out_pixels();
}

}  // namespace

void add_images(py::module_& module) {
  module.def("read_tile", &read_tile);
  module.def("place_in_planes", &place);
}
