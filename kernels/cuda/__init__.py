"""CUDA kernels (`src/`), their compilation, and their launch on a GPU.

To add a kernel, see `launch.py`.
"""
