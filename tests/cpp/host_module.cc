// Host code that the library hides, for pytest: checked arithmetic and the building of a Status.
#include <pybind11/pybind11.h>

#include <string>

#include "core/build.h"
#include "core/checked_math.h"
#include "core/status.h"

namespace py = pybind11;

namespace {

using Checked = bool (*)(int64_t, int64_t, int64_t*);

// The result, or None if the function says that there is none.
template <Checked kFunction>
py::object result_or_none(int64_t a, int64_t b) {
  constexpr int64_t kUntouched = 1234567890123456789;
  int64_t result = kUntouched;
  if (kFunction(a, b, &result)) return py::int_(result);
  if (result != kUntouched) throw py::value_error("a refused result was written");
  return py::none();
}

py::tuple fields(const cutfuse::Status& status) {
  return py::make_tuple(static_cast<int32_t>(status.code), std::string(status.message));
}

cutfuse::Status check_below(int64_t value, int64_t limit) {
  CUTFUSE_CHECK(value < limit, cutfuse::Code::kInvalidShape, "value is %lld but the limit is %lld",
                static_cast<long long>(value), static_cast<long long>(limit));
  return {};
}

cutfuse::Status check_cuda(int result) {
  CUTFUSE_CUDA(result);
  return {};
}

}  // namespace

PYBIND11_MODULE(pycutfuse_host_tests, module) {
  module.attr("MESSAGE_BYTES") = static_cast<int>(cutfuse::Status::kMessageBytes);
  module.def("checked_add", &result_or_none<cutfuse::checked_add>);
  module.def("checked_multiply", &result_or_none<cutfuse::checked_multiply>);
  module.def("checked_ceil_div", &result_or_none<cutfuse::checked_ceil_div>);
  module.def("checked_round_up", &result_or_none<cutfuse::checked_round_up>);
  module.def("error", [](int32_t code, const std::string& text, int64_t number) {
    return fields(cutfuse::error(static_cast<cutfuse::Code>(code), "%s: %lld", text.c_str(),
                                 static_cast<long long>(number)));
  });
  module.def("code_name",
             [](int32_t code) { return cutfuse::to_string(static_cast<cutfuse::Code>(code)); });
  module.def("check_below",
             [](int64_t value, int64_t limit) { return fields(check_below(value, limit)); });
  module.def("check_cuda", [](int result) { return fields(check_cuda(result)); });
  module.def("architectures", &cutfuse::architectures);
}
