# The compiled GEMM kernels, one row each: CTA tile (K tile is 64), cluster along M, pipeline slots
# (each holds one plane's tile of A and of B; the slots fill the 227 KB of shared memory), K between
# promotions. `dev` rows are the only ones that the dev preset compiles.
set(CUTFUSE_GEMM_INSTANCES
  # TILE_M TILE_N CLUSTER_M STAGES PROMOTE_K
  "128 128 2 6 64 dev"
  "128 192 2 5 64 dev"
  "128 128 1 6 16 dev"
  "128 128 1 6 64"
  "128 192 1 5 64")
