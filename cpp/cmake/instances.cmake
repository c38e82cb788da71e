# Concern: one row of a kernel table -> one small translation unit in the build tree.

# cutfuse_instances(
#   ROWS <row>...          "v1 v2 ... [dev]": values of COLUMNS, then `dev` if the dev preset has it
#   COLUMNS <name>...      names of the values; the unit's template reads @name@ and @INSTANCE@
#   UNIT <dir/file.cu.in>  becomes dir/instance_<v1>_<v2>....cu for each row
#   DECLARATION <line>     added to DECLARATIONS in the caller's scope, and
#   ENTRY <line>           to ENTRIES, for each row, with @INSTANCE@ replaced by instance_<v1>_...
#   ARCHITECTURE <90a>)    as cutfuse_cuda_sources takes it
function(cutfuse_instances)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "UNIT;DECLARATION;ENTRY;ARCHITECTURE" "ROWS;COLUMNS")
  get_filename_component(directory "${arg_UNIT}" DIRECTORY)
  foreach(row IN LISTS arg_ROWS)
    separate_arguments(values UNIX_COMMAND "${row}")
    if("dev" IN_LIST values)
      list(REMOVE_ITEM values dev)
    elseif(CUTFUSE_DEV_KERNELS)
      continue()
    endif()
    list(LENGTH values count)
    list(LENGTH arg_COLUMNS expected)
    if(NOT count EQUAL expected)
      message(FATAL_ERROR
        "Kernel table row '${row}' has ${count} values; its columns are ${arg_COLUMNS}")
    endif()
    foreach(column value IN ZIP_LISTS arg_COLUMNS values)
      set(${column} "${value}")
    endforeach()
    list(JOIN values "_" INSTANCE)
    set(INSTANCE "instance_${INSTANCE}")
    set(unit "${CMAKE_CURRENT_BINARY_DIR}/${directory}/${INSTANCE}.cu")
    configure_file("${arg_UNIT}" "${unit}" @ONLY)
    cutfuse_cuda_sources("${arg_ARCHITECTURE}" "${unit}")
    string(CONFIGURE "${arg_DECLARATION}\n" line @ONLY)
    string(APPEND DECLARATIONS "${line}")
    string(CONFIGURE "${arg_ENTRY}\n" line @ONLY)
    string(APPEND ENTRIES "${line}")
  endforeach()
  set(DECLARATIONS "${DECLARATIONS}" PARENT_SCOPE)
  set(ENTRIES "${ENTRIES}" PARENT_SCOPE)
endfunction()

# cutfuse_registry(<file.cc.in>): becomes <file.cc>; reads @DECLARATIONS@ and @ENTRIES@ of all the
# tables above it.
function(cutfuse_registry template)
  get_filename_component(registry "${template}" NAME_WLE)
  configure_file("${template}" "${CMAKE_CURRENT_BINARY_DIR}/${registry}" @ONLY)
  target_sources(cutfuse_objects PRIVATE "${CMAKE_CURRENT_BINARY_DIR}/${registry}")
endfunction()
