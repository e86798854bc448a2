"""CUDA sources and their loading."""
