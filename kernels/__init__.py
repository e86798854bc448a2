"""Numeric kernels: references, CPU fast paths and CUDA sources."""
