# Concern: a libcutfuse.so that was built elsewhere (CUTFUSE_PREBUILT_DIR). Its ABI is checked now,
# so that a binding that could only crash is never made.

file(STRINGS "${PROJECT_SOURCE_DIR}/include/cutfuse/version.h" line REGEX "kAbiVersion = [0-9]+")
string(REGEX REPLACE ".*kAbiVersion = ([0-9]+).*" "\\1" expected "${line}")

set(CUTFUSE_PREBUILT_LIBRARY "${CUTFUSE_PREBUILT_DIR}/libcutfuse.so")
if(NOT EXISTS "${CUTFUSE_PREBUILT_LIBRARY}")
  message(FATAL_ERROR
    "CUTFUSE_PREBUILT_DIR is ${CUTFUSE_PREBUILT_DIR}, but it holds no libcutfuse.so. Name the "
    "folder that does, or leave the option out to build from source.")
endif()
execute_process(
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/abi_version.py"
          "${CUTFUSE_PREBUILT_LIBRARY}"
  RESULT_VARIABLE status OUTPUT_VARIABLE found ERROR_VARIABLE reason
  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)
if(NOT status EQUAL 0)
  message(FATAL_ERROR
    "${CUTFUSE_PREBUILT_LIBRARY} is not a usable libcutfuse (${status}): ${reason}\nIt is truncated, foreign "
    "or for another platform; get the file again, or build from source.")
endif()
if(NOT found EQUAL expected)
  message(FATAL_ERROR
    "${CUTFUSE_PREBUILT_LIBRARY} has ABI ${found}, but this source tree needs ABI ${expected}. "
    "Use the libcutfuse.so of version ${PROJECT_VERSION}, or build from source.")
endif()
message(STATUS "Prebuilt libcutfuse with ABI ${found}: ${CUTFUSE_PREBUILT_LIBRARY}")

add_library(cutfuse SHARED IMPORTED GLOBAL)
set_target_properties(cutfuse PROPERTIES
  IMPORTED_LOCATION "${CUTFUSE_PREBUILT_LIBRARY}"
  IMPORTED_NO_SONAME OFF
  INTERFACE_INCLUDE_DIRECTORIES "${PROJECT_SOURCE_DIR}/include")
