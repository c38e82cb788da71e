# Concern: CUTLASS's headers: CUTFUSE_CUTLASS_DIR, else the wheel that third_party/ pins by hash.
# Sets CUTFUSE_CUTLASS_VERSION and the target cutlass (its headers, as system headers).

set(expected 4.2.0)
set(remedy "Without network access, configure with -DCUTFUSE_CUTLASS_DIR=<a CUTLASS ${expected} folder that holds include/cutlass> (for pip: pip install . -Ccmake.define.CUTFUSE_CUTLASS_DIR=<folder>).")

if(CUTFUSE_CUTLASS_DIR)
  set(root "${CUTFUSE_CUTLASS_DIR}")
else()
  set(CUTFUSE_CUTLASS_REQUIREMENTS "${PROJECT_SOURCE_DIR}/third_party/requirements-cutlass.txt")
  cutfuse_fetch_wheel("CUTLASS ${expected}" "${CUTFUSE_CUTLASS_REQUIREMENTS}"
    "${PROJECT_BINARY_DIR}/third_party/cutlass" "${remedy}")
  set(root "${PROJECT_BINARY_DIR}/third_party/cutlass/files/cutlass_library/source")
endif()

set(header "${root}/include/cutlass/version.h")
if(NOT EXISTS "${header}")
  message(FATAL_ERROR "No CUTLASS in ${root}: ${header} is missing. ${remedy}")
endif()
set(CUTFUSE_CUTLASS_VERSION "")
foreach(part MAJOR MINOR PATCH)
  file(STRINGS "${header}" line REGEX "#define CUTLASS_${part} ")
  string(REGEX MATCH "[0-9]+" number "${line}")
  list(APPEND CUTFUSE_CUTLASS_VERSION "${number}")
endforeach()
list(JOIN CUTFUSE_CUTLASS_VERSION "." CUTFUSE_CUTLASS_VERSION)
if(NOT CUTFUSE_CUTLASS_VERSION STREQUAL expected)
  message(WARNING
    "CUTLASS in ${root} is ${CUTFUSE_CUTLASS_VERSION}; the kernels compose collectives of "
    "${expected}, and other versions are not tested.")
endif()
message(STATUS "CUTLASS ${CUTFUSE_CUTLASS_VERSION}: ${root}")

add_library(cutlass INTERFACE)
target_include_directories(cutlass SYSTEM INTERFACE
  "${root}/include" "${root}/tools/util/include")
