#include "bindings/bindings.h"

PYBIND11_MODULE(_C, module) {
  using namespace cutfuse::bindings;
  module.doc() = "Binding of libcutfuse: numbers and pointers in, typed exceptions out.";
  add_version(module);
  add_device(module);  // first the types that later signatures name
  add_program(module);
  add_gemm(module);
  add_fused(module);
  add_launch(module);
  add_replay(module);
  add_conv(module);
  add_split(module);
  add_row_reduce(module);
}
