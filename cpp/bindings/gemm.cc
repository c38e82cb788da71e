#include "cutfuse/gemm.h"

#include "bindings/bindings.h"

namespace py = pybind11;

namespace cutfuse::bindings {
namespace {

GemmPolicy make_policy(int32_t tile_m, int32_t tile_n, int32_t cluster_m, int32_t promote_k,
                       int32_t raster, int32_t swizzle, int32_t split_k, int32_t arch,
                       int32_t element, int32_t source, int32_t trailing_blocks) {
  GemmPolicy policy;
  policy.tile_m = tile_m;
  policy.tile_n = tile_n;
  policy.cluster_m = cluster_m;
  policy.promote_k = promote_k;
  policy.raster = static_cast<Raster>(raster);
  policy.swizzle = swizzle;
  policy.split_k = split_k;
  policy.arch = arch;
  policy.element = static_cast<DType>(element);
  policy.source = static_cast<Source>(source);
  policy.trailing_blocks = trailing_blocks;
  return policy;
}

py::list policy_list() {
  std::vector<GemmPolicy> policies(static_cast<size_t>(compiled_policies(nullptr, 0)));
  compiled_policies(policies.data(), static_cast<int32_t>(policies.size()));
  py::list list;
  for (const GemmPolicy& policy : policies) list.append(policy);
  return list;
}

GemmPolicy select(int64_t m, int64_t n, int64_t k, const DeviceProps& device, int32_t precision,
                  int32_t dtype) {
  GemmProblem problem;
  problem.m = m;
  problem.n = n;
  problem.k = k;
  problem.precision = static_cast<Precision>(precision);
  problem.dtype = static_cast<DType>(dtype);
  check(why_not(problem, device));
  return select_policy(problem, device);
}

}  // namespace

void add_gemm(py::module_& module) {
  using namespace py::literals;
  py::class_<GemmPolicy>(module, "GemmPolicy")
      .def(py::init(&make_policy), "tile_m"_a, "tile_n"_a, "cluster_m"_a = 1, "promote_k"_a = 64,
           "raster"_a = 0, "swizzle"_a = 1, "split_k"_a = 1, "arch"_a = 90, "element"_a = 1,
           "source"_a = 0, "trailing_blocks"_a = 0)
      .def_readwrite("tile_m", &GemmPolicy::tile_m)
      .def_readwrite("tile_n", &GemmPolicy::tile_n)
      .def_readwrite("cluster_m", &GemmPolicy::cluster_m)
      .def_readwrite("promote_k", &GemmPolicy::promote_k)
      .def_property(
          "raster", [](const GemmPolicy& policy) { return static_cast<int32_t>(policy.raster); },
          [](GemmPolicy& policy, int32_t raster) { policy.raster = static_cast<Raster>(raster); })
      .def_readwrite("swizzle", &GemmPolicy::swizzle)
      .def_readwrite("split_k", &GemmPolicy::split_k)
      .def_readwrite("arch", &GemmPolicy::arch)
      .def_readwrite("trailing_blocks", &GemmPolicy::trailing_blocks)
      .def_property(
          "element", [](const GemmPolicy& policy) { return static_cast<int32_t>(policy.element); },
          [](GemmPolicy& policy, int32_t element) { policy.element = static_cast<DType>(element); })
      .def_property(
          "source", [](const GemmPolicy& policy) { return static_cast<int32_t>(policy.source); },
          [](GemmPolicy& policy, int32_t source) { policy.source = static_cast<Source>(source); })
      .def(
          "__eq__", [](const GemmPolicy& a, const GemmPolicy& b) { return a == b; },
          py::is_operator())
      .def("__repr__", [](const GemmPolicy& policy) { return to_string(policy); });
  module.def("compiled_policies", &policy_list);
  module.def("select_policy", &select, "m"_a, "n"_a, "k"_a, "device"_a, "precision"_a = 0,
             "dtype"_a = 0);
}

}  // namespace cutfuse::bindings
