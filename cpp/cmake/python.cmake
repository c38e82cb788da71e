# Concern: the Python that the binding is compiled for, which also fetches pinned wheels.

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)

# Downloads the one wheel that `requirements` pins by hash and unpacks it in `directory`, once per
# pin. Stops with what to do when it is not there or not the file that was pinned.
function(cutfuse_fetch_wheel what requirements directory remedy)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${requirements}")
  file(SHA256 "${requirements}" pin)
  if(EXISTS "${directory}/${pin}.stamp")
    return()
  endif()
  message(STATUS "Fetching ${what}")
  file(REMOVE_RECURSE "${directory}")
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -m pip download --no-deps --only-binary=:all: --require-hashes
            --dest "${directory}/wheel" --requirement "${requirements}"
    RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  file(GLOB wheel "${directory}/wheel/*.whl")
  if(status EQUAL 0 AND wheel)
    file(ARCHIVE_EXTRACT INPUT "${wheel}" DESTINATION "${directory}/files")
    file(TOUCH "${directory}/${pin}.stamp")
    return()
  endif()
  if(output MATCHES "DO NOT MATCH THE HASHES")
    set(reason "The downloaded file is not the one that ${requirements} pins: it was tampered with or damaged, and it is not used. Empty the pip cache (python -m pip cache purge), check the package index or mirror that pip is set to, and configure again.")
  elseif(output MATCHES "No module named pip")
    set(reason "${Python_EXECUTABLE} has no pip. Run `${Python_EXECUTABLE} -m ensurepip` or configure with -DPython_EXECUTABLE=<a Python that has pip>.")
  else()
    set(reason "pip could not download it. Check the network and pip's index settings, and configure again.")
  endif()
  message(FATAL_ERROR "No ${what}. ${reason} ${remedy}\npip said:\n${output}")
endfunction()

# pybind11: the environment's (pip's isolated build has it), else the pinned wheel.
function(cutfuse_find_pybind11)
  execute_process(COMMAND "${Python_EXECUTABLE}" -m pybind11 --cmakedir
    OUTPUT_VARIABLE directory OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    cutfuse_fetch_wheel(pybind11 "${PROJECT_SOURCE_DIR}/third_party/requirements-pybind11.txt"
      "${PROJECT_BINARY_DIR}/third_party/pybind11"
      "Or install it: ${Python_EXECUTABLE} -m pip install pybind11.")
    set(directory "${PROJECT_BINARY_DIR}/third_party/pybind11/files/pybind11/share/cmake/pybind11")
  endif()
  set(pybind11_DIR "${directory}" CACHE PATH "pybind11's CMake package" FORCE)
endfunction()

# A macro: the imported targets must be visible to the caller.
macro(cutfuse_enable_pybind11)
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
  set(PYBIND11_FINDPYTHON ON)
  cutfuse_find_pybind11()
  find_package(pybind11 3.0 CONFIG REQUIRED)
endmacro()
