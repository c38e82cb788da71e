# Concern: device code is compiled per unit, only for the architectures that the unit is for.

# cutfuse_cuda_sources(<90a|80|any> <file>...): adds .cu files of this room to the library.
# 90a: wgmma and TMA, runs on compute capability 9.0 only. 80: what runs from 8.0 on and has a 90a
# counterpart: machine code for 8.x, PTX for later ones. any: as 80, and machine code for 9.0, which
# 80 has too in builds with tests: they force these kernels there, and the driver would compile each
# for half a minute.
#
# The PTX is never older than compute_90: from 9.0 on kernels are launched to overlap, and only
# code for compute_90 waits for its predecessor (core/launch.h).
function(cutfuse_cuda_sources architecture)
  set(sm_80 "-gencode=arch=compute_80,code=sm_80")
  set(sm_90 "-gencode=arch=compute_90,code=sm_90")
  set(ptx "-gencode=arch=compute_90,code=compute_90")
  if(architecture STREQUAL "90a")
    set(options "-gencode=arch=compute_90a,code=sm_90a")
    set(names sm_90a)
  elseif(architecture STREQUAL "80")
    set(options "${sm_80}" "${ptx}")
    set(names sm_80 compute_90)
    if(CUTFUSE_BUILD_TESTS)
      list(APPEND options "${sm_90}")
    endif()
  elseif(architecture STREQUAL "any")
    set(options "${sm_80}" "${sm_90}" "${ptx}")
    set(names sm_80 sm_90 compute_90)
  else()
    message(FATAL_ERROR "cutfuse_cuda_sources: '${architecture}' is none of 90a, 80, any")
  endif()
  target_sources(cutfuse_objects PRIVATE ${ARGN})
  set_property(SOURCE ${ARGN} TARGET_DIRECTORY cutfuse_objects APPEND PROPERTY COMPILE_OPTIONS
    ${options})
  set_property(GLOBAL APPEND PROPERTY CUTFUSE_ARCHITECTURES ${names})
endfunction()

# "compute_90, sm_80, sm_90, sm_90a": what cutfuse::build_info() says.
function(cutfuse_architectures result)
  get_property(list GLOBAL PROPERTY CUTFUSE_ARCHITECTURES)
  list(REMOVE_DUPLICATES list)
  list(SORT list)
  list(JOIN list ", " list)
  set(${result} "${list}" PARENT_SCOPE)
endfunction()
