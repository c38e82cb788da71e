# The compiled shift kernels, one row each: element of the planes, pixels of one instruction, planes
# of x and of the weight (2: ieee).
set(CUTFUSE_SHIFT_INSTANCES
  # ELEMENT TILE_N PLANES
  "half_t 256 1 dev"
  "half_t 192 1"
  "half_t 128 1"
  "half_t 128 2 dev"
  "half_t 64 2")
