// Host code that the library hides, for pytest: checked arithmetic, the building of a Status, and
// what a logsumexp does with indices and values.
#include <pybind11/pybind11.h>

#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "core/build.h"
#include "core/checked_math.h"
#include "core/status.h"
#include "cutfuse/conv.h"
#include "cutfuse/row_reduce.h"
#include "device/online_logsumexp.h"
#include "row_reduce/index.h"

namespace py = pybind11;

void add_images(py::module_& module);   // host_images.cc
void add_program(py::module_& module);  // host_program.cc

namespace {

int64_t allocations_left = INT64_MAX;  // before the next one of this module fails

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

std::vector<int64_t> integers(const py::sequence& numbers) {
  std::vector<int64_t> made;
  for (const py::handle& number : numbers) made.push_back(number.cast<int64_t>());
  return made;
}

py::list offsets(const cutfuse::StridedIndex& index, int64_t count) {
  py::list made;
  for (int64_t i = 0; i < count; ++i) made.append(cutfuse::row_reduce::offset_of(index, i));
  return made;
}

// A plan's fields, and every offset that its kernel forms; or (code, message).
py::object logsumexp_plan(const py::sequence& sizes, const py::sequence& strides, uint64_t reduced,
                          int32_t dtype, int32_t sm_count, bool with_offsets) {
  const std::vector<int64_t> size = integers(sizes);
  const std::vector<int64_t> stride = integers(strides);
  cutfuse::DeviceProps device;
  device.major = 9;
  device.sm_count = sm_count;
  device.driver_version = 13000;
  cutfuse::LogSumExpProblem problem;
  problem.dim_count = static_cast<int32_t>(size.size());
  problem.sizes = size.data();
  problem.strides = stride.data();
  problem.reduced = reduced;
  problem.dtype = static_cast<cutfuse::DType>(dtype);
  cutfuse::LogSumExpPlan plan;
  if (const auto status = plan_logsumexp(problem, device, &plan); !status.ok()) {
    return fields(status);
  }
  py::dict made;
  made["text"] = to_string(plan);
  made["rows"] = plan.rows;
  made["length"] = plan.length;
  made["columns"] = plan.reading == cutfuse::RowReading::kColumns;
  made["width"] = plan.width;
  made["vectors"] = plan.vectors;
  made["splits"] = plan.splits;
  made["split_length"] = plan.split_length;
  made["workspace_bytes"] = plan.workspace_bytes;
  if (with_offsets) {
    made["kept"] = offsets(plan.kept, plan.rows);
    made["kept_out"] = offsets(plan.kept_out, plan.rows);
    made["reduced"] = offsets(plan.reduced, plan.length);
  }
  return made;
}

// As a kernel does it with `threads` threads: batches padded with -inf, then a tree of merges.
py::tuple logsumexp_of_values(const py::sequence& values, int64_t threads) {
  constexpr int kBatch = 4;
  std::vector<float> v;
  for (const py::handle& value : values) v.push_back(value.cast<float>());
  std::vector<cutfuse::LogSumExpPartial> states(static_cast<size_t>(threads),
                                                cutfuse::empty_logsumexp());
  for (size_t t = 0; t < states.size(); ++t) {
    for (size_t first = t; first < v.size(); first += kBatch * states.size()) {
      float batch[kBatch];
      for (size_t i = 0; i < kBatch; ++i) {
        const size_t at = first + i * states.size();
        batch[i] = at < v.size() ? v[at] : -INFINITY;
      }
      cutfuse::add_values(states[t], batch);
    }
  }
  for (size_t half = states.size() / 2; half > 0; half /= 2) {
    for (size_t t = 0; t < half; ++t) {
      states[t] = cutfuse::MergeLogSumExp{}(states[t], states[t + half]);
    }
  }
  return py::make_tuple(states[0].max, states[0].sum, cutfuse::logsumexp_of(states[0]));
}

// The code of a convolution's plan when memory runs out after so many allocations.
int32_t plan_without_memory(int64_t allocations) {
  cutfuse::DeviceProps device;
  device.major = 9;
  device.sm_count = 132;
  device.shared_bytes = 232448;
  cutfuse::FusedConvProblem problem;
  problem.conv = {1, 16, 32, 32, 16, 3, 3, 1, 1, 1, 1, 1, 1, 1, 32, 32};
  cutfuse::ConvPlan* plan = nullptr;
  allocations_left = allocations;
  const cutfuse::Status status = make_conv_plan(problem, device, nullptr, &plan);
  allocations_left = INT64_MAX;
  cutfuse::destroy_conv_plan(plan);
  return static_cast<int32_t>(status.code);
}

float merged_logsumexp(const py::sequence& partials) {
  cutfuse::LogSumExpPartial all = cutfuse::empty_logsumexp();
  for (const py::handle& item : partials) {
    const auto pair = item.cast<py::tuple>();
    all = cutfuse::MergeLogSumExp{}(all, {pair[0].cast<float>(), pair[1].cast<float>()});
  }
  return cutfuse::logsumexp_of(all);
}

}  // namespace

void* operator new(size_t bytes) {
  void* memory = allocations_left-- > 0 ? std::malloc(bytes) : nullptr;
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

PYBIND11_MODULE(pycutfuse_host_tests, module) {
  add_images(module);
  add_program(module);
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
  module.def("logsumexp_plan", &logsumexp_plan);
  module.def("logsumexp_of_values", &logsumexp_of_values);
  module.def("merged_logsumexp", &merged_logsumexp);
  module.def("plan_without_memory", &plan_without_memory);
}
