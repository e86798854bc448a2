"""Reference implementations, slow and simple, whose bits CUDA kernels and C code must match.

To add an operation, write a function in the module of its kind and its call in `backend.py`.
"""
