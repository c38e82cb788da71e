#include "cutfuse/version.h"

#include "bindings/bindings.h"

namespace cutfuse::bindings {

void add_version(pybind11::module_& module) {
  module.attr("ABI_VERSION") = kAbiVersion;
  module.def("abi_version", &abi_version);
  module.def("version", &version);
  module.def("build_info", &build_info);
}

}  // namespace cutfuse::bindings
