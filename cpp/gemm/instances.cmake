# The compiled sm_90 GEMM kernels, one row each: element of planes or tensors, CTA tile (K tile is
# 64), cluster along M, pipeline slots (each holds one plane's tile of A and of B; the slots fill the
# 227 KB of shared memory), K between promotions (0: one plane or a tensor, never promoted). `dev`
# rows are the only ones that the dev preset compiles.
set(CUTFUSE_GEMM_SM90_INSTANCES
  # ELEMENT TILE_M TILE_N CLUSTER_M STAGES PROMOTE_K
  "half_t 128 128 2 6 64 dev"
  "half_t 128 192 2 5 64"
  "half_t 128 128 1 6 16 dev"
  "half_t 128 128 1 6 64"
  "half_t 128 192 1 5 64"
  "half_t 128 256 2 4 0"
  "half_t 128 128 1 6 0 dev"
  "bfloat16_t 128 256 2 4 0"
  "bfloat16_t 128 128 1 6 0 dev")

# The compiled sm_80 GEMM kernels: tile of a block and of a warp, K tile, stages of the copy ring (at
# most 99 KB; the 64x64 tiles and those of one plane leave room for two blocks of an SM), K between
# promotions as above.
set(CUTFUSE_GEMM_SM80_INSTANCES
  # ELEMENT TILE_M TILE_N WARP_M WARP_N TILE_K STAGES PROMOTE_K
  "kFloat16 128 128 64 32 32 3 32"
  "kFloat16 128 128 64 32 32 3 16"
  "kFloat16 64 64 32 32 32 3 32 dev"
  "kFloat16 64 64 32 32 32 3 16"
  "kFloat16 128 128 64 64 32 3 0"
  "kFloat16 64 64 32 32 64 3 0 dev"
  "kBFloat16 128 128 64 64 32 3 0"
  "kBFloat16 64 64 32 32 64 3 0 dev")

# The compiled sm_90 GEMM kernels of images, columns as of the first table.
set(CUTFUSE_GEMM_SM90_IMAGE_INSTANCES
  # ELEMENT TILE_M TILE_N CLUSTER_M STAGES PROMOTE_K
  "half_t 128 128 1 6 64 dev"
  "half_t 128 128 1 6 16"
  "half_t 128 256 2 4 0"
  "half_t 128 128 1 6 0 dev"
  "half_t 128 64 1 8 0"
  "bfloat16_t 128 256 2 4 0"
  "bfloat16_t 128 128 1 6 0"
  "bfloat16_t 128 64 1 8 0")

# The compiled sm_90 GEMM kernels of fp32 NCHW images as they are, columns as of the first table: at
# TF32 (K tile is 32), and in planes that a warp splits its pixels into.
set(CUTFUSE_GEMM_SM90_NCHW_INSTANCES
  # ELEMENT TILE_M TILE_N CLUSTER_M STAGES PROMOTE_K
  "float 128 64 1 8 0 dev"
  "float 128 128 1 6 0"
  "half_t 128 64 1 8 64 dev"
  "half_t 128 64 1 8 16"
  "half_t 128 128 1 6 64"
  "half_t 128 128 1 6 16")

# The compiled sm_90 GEMM kernels of layers that are turned over: A is the weight, in fp32 rounded on
# its way, and B the plane of x, or x. Columns as of the first table.
set(CUTFUSE_GEMM_SM90_TURNED_INSTANCES
  # ELEMENT TILE_M TILE_N CLUSTER_M STAGES PROMOTE_K
  "float 128 256 2 3 0 dev"
  "half_t 128 256 2 4 0"
  "bfloat16_t 128 256 2 4 0")

# And the sm_80 ones of images, columns as of the second table.
set(CUTFUSE_GEMM_SM80_IMAGE_INSTANCES
  # ELEMENT TILE_M TILE_N WARP_M WARP_N TILE_K STAGES PROMOTE_K
  "kFloat16 64 64 32 32 32 3 32 dev"
  "kFloat16 64 64 32 32 32 3 16"
  "kFloat16 64 64 32 32 64 3 0"
  "kBFloat16 64 64 32 32 64 3 0")
