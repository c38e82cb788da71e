# Concern: which compilers there are, and what can be built with them.

set(CUTFUSE_MINIMUM_CUDA 13.0)  # the oldest that the kernels were compiled and tested with
set(CUTFUSE_GET_NVCC "To get the kernels, install the CUDA toolkit ${CUTFUSE_MINIMUM_CUDA} or newer, put nvcc on PATH or set CUDA_HOME, and build again; or point CUTFUSE_PREBUILT_DIR at a folder with a libcutfuse.so of version ${PROJECT_VERSION}.")

# Where PyTorch looks too: PATH, then CUDA_HOME or CUDA_PATH, then the toolkit's default place.
function(cutfuse_find_nvcc)
  if(CMAKE_CUDA_COMPILER OR DEFINED ENV{CUDACXX})
    return()
  endif()
  if(DEFINED ENV{CUDA_HOME})
    set(root "$ENV{CUDA_HOME}")
  elseif(DEFINED ENV{CUDA_PATH})
    set(root "$ENV{CUDA_PATH}")
  else()
    set(root /usr/local/cuda)
  endif()
  find_program(CMAKE_CUDA_COMPILER nvcc PATHS ENV PATH "${root}/bin" NO_DEFAULT_PATH
    DOC "CUDA compiler")
endfunction()

# source: nvcc compiles everything. prebuilt: only the binding. none: the reference path only.
function(cutfuse_choose_backend result)
  if(CUTFUSE_PREBUILT_DIR)
    set(${result} prebuilt PARENT_SCOPE)
    return()
  endif()
  set(${result} none PARENT_SCOPE)
  if(CUTFUSE_NATIVE STREQUAL "OFF")
    message(STATUS "CUTFUSE_NATIVE=OFF: reference-only package, nothing is compiled.")
    return()
  endif()
  cutfuse_find_nvcc()
  if(CMAKE_CUDA_COMPILER OR DEFINED ENV{CUDACXX})
    set(${result} source PARENT_SCOPE)
  elseif(CUTFUSE_NATIVE STREQUAL "ON")
    message(FATAL_ERROR "CUTFUSE_NATIVE=ON but there is no nvcc. ${CUTFUSE_GET_NVCC}")
  else()
    message(WARNING
      "No nvcc: this is a reference-only package. Every operator runs the plain PyTorch chain, "
      "with no fused kernel. ${CUTFUSE_GET_NVCC}")
  endif()
endfunction()

# A macro: enable_language must run in the top-level scope.
macro(cutfuse_enable_languages backend)
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
  endif()
  enable_language(CXX)
  set(CMAKE_CXX_STANDARD 17)
  set(CMAKE_CXX_STANDARD_REQUIRED ON)
  set(CMAKE_CXX_EXTENSIONS OFF)
  set(CMAKE_CXX_VISIBILITY_PRESET hidden)
  set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
  set(CMAKE_POSITION_INDEPENDENT_CODE ON)
  set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
  set(CMAKE_INSTALL_RPATH "$ORIGIN")
  if("${backend}" STREQUAL "source")
    set(CMAKE_CUDA_ARCHITECTURES OFF)  # each unit names its own: architectures.cmake
    enable_language(CUDA)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS CUTFUSE_MINIMUM_CUDA)
      message(FATAL_ERROR
        "${CMAKE_CUDA_COMPILER} is CUDA ${CMAKE_CUDA_COMPILER_VERSION}, "
        "but the kernels need ${CUTFUSE_MINIMUM_CUDA} or newer. ${CUTFUSE_GET_NVCC}")
    endif()
    set(CMAKE_CUDA_STANDARD 17)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(CMAKE_CUDA_EXTENSIONS OFF)
    set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    find_package(CUDAToolkit REQUIRED)
  endif()
endmacro()
