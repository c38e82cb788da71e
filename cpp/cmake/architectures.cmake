# Concern: device code is compiled per unit, only for the architectures that the unit is for.

# cutfuse_cuda_sources(<90|90a> <file>...): adds .cu files of this room to the library.
# 90a: wgmma and TMA, runs on compute capability 9.0 only. 90: plain code for the same GPUs.
function(cutfuse_cuda_sources architecture)
  target_sources(cutfuse_objects PRIVATE ${ARGN})
  set_property(SOURCE ${ARGN} TARGET_DIRECTORY cutfuse_objects APPEND PROPERTY COMPILE_OPTIONS
    "-gencode=arch=compute_${architecture},code=sm_${architecture}")
  set_property(GLOBAL APPEND PROPERTY CUTFUSE_ARCHITECTURES "sm_${architecture}")
endfunction()

# "sm_90, sm_90a": what cutfuse::build_info() says.
function(cutfuse_architectures result)
  get_property(list GLOBAL PROPERTY CUTFUSE_ARCHITECTURES)
  list(REMOVE_DUPLICATES list)
  list(SORT list)
  list(JOIN list ", " list)
  set(${result} "${list}" PARENT_SCOPE)
endfunction()
