"""CUDA sources (`src/`), their compilation, and their launch on a GPU.

To add a kernel: its source, its line in `sources.py`, and its call in `backend.py`.
"""
