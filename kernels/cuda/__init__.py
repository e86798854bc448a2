"""CUDA sources, their compilation, and their launch on a GPU or, for tests, on a CPU."""
