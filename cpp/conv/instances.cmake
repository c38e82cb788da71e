# The compiled shift kernels, one row each: element of the planes, pixels of one instruction, planes
# of x and of the weight (2: ieee), and Role. Each comes in all roles.
set(CUTFUSE_SHIFT_INSTANCES "")
foreach(role IN ITEMS kStore kStatistics kLast kAny)
  # ELEMENT TILE_N PLANES ROLE
  list(APPEND CUTFUSE_SHIFT_INSTANCES
    "half_t 256 1 ${role} dev"
    "half_t 192 1 ${role}"
    "half_t 128 1 ${role}"
    "half_t 256 2 ${role}"
    "half_t 128 2 ${role} dev"
    "half_t 64 2 ${role}")
endforeach()

# The compiled patch kernels: output channels at once, planes of x and of the weight.
set(CUTFUSE_PATCH_INSTANCES
  # CHANNELS PLANES
  "64 1"
  "96 1"
  "64 2"
  "96 2 dev")
