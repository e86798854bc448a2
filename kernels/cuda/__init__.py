"""The place of CUDA sources and their loading; there are none yet."""
