#include "cutfuse/device.h"

#include <cstring>
#include <string>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace cutfuse::bindings {
namespace {

void set_name(DeviceProps& device, const std::string& name) {
  std::memset(device.name, 0, sizeof(device.name));
  std::strncpy(device.name, name.c_str(), sizeof(device.name) - 1);
}

DeviceProps make_device(int32_t index, int32_t major, int32_t minor, int32_t sm_count,
                        int64_t shared_bytes, int64_t l2_bytes, int32_t driver_version,
                        const std::string& name) {
  DeviceProps device;
  device.index = index;
  device.major = major;
  device.minor = minor;
  device.sm_count = sm_count;
  device.shared_bytes = shared_bytes;
  device.l2_bytes = l2_bytes;
  device.driver_version = driver_version;
  set_name(device, name);
  return device;
}

DeviceProps query(int32_t index) {
  DeviceProps device;
  Status status;
  {
    const py::gil_scoped_release release;
    status = query_device(index, &device);
  }
  check(status);
  return device;
}

}  // namespace

void add_device(py::module_& module) {
  using namespace py::literals;
  py::class_<DeviceProps>(module, "DeviceProps",
                          "Properties of a GPU; may be constructed by hand to plan without one.")
      .def(py::init(&make_device), py::kw_only(), "index"_a = 0, "major"_a = 9, "minor"_a = 0,
           "sm_count"_a = 132, "shared_bytes"_a = 232448, "l2_bytes"_a = 62914560,
           "driver_version"_a = 13000, "name"_a = "")
      .def_readwrite("index", &DeviceProps::index)
      .def_readwrite("major", &DeviceProps::major)
      .def_readwrite("minor", &DeviceProps::minor)
      .def_readwrite("sm_count", &DeviceProps::sm_count)
      .def_readwrite("shared_bytes", &DeviceProps::shared_bytes)
      .def_readwrite("l2_bytes", &DeviceProps::l2_bytes)
      .def_readwrite("driver_version", &DeviceProps::driver_version)
      .def_property(
          "name", [](const DeviceProps& device) { return std::string(device.name); }, &set_name);
  module.def("device_count", &device_count, py::call_guard<py::gil_scoped_release>());
  module.def("query_device", &query, "index"_a);
  module.def(
      "check_device", [](const DeviceProps& device) { return reason(check_device(device)); },
      "device"_a);
}

}  // namespace cutfuse::bindings
