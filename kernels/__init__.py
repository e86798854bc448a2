"""Numeric kernels: references and CPU fast paths."""
