"""The frozen arithmetic, slow and plain, that GPU kernels and rounding in C must equal.

To add an operation: a function in the module of its kind, and its call in `backend.py`.
"""
