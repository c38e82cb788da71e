# Concern: compiler warnings of the project's own code (third-party headers are system headers).

add_library(cutfuse_warnings INTERFACE)
set(warnings -Wall -Wextra -Wshadow -Wnon-virtual-dtor)
if(CUTFUSE_WERROR)
  list(APPEND warnings -Werror)
endif()
target_compile_options(cutfuse_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:${warnings}>)
# nvcc's generated host code trips -Wshadow and -Wunused; the rest goes through.
target_compile_options(cutfuse_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Wno-unused-parameter>
  $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${CUTFUSE_WERROR}>>:--Werror=all-warnings>)
