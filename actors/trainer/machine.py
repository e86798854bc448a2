"""The arithmetic of this process: what determines the bits of a step besides data and settings."""

from functools import cache
from pathlib import Path

import torch

_CPU_INFO = Path("/proc/cpuinfo")
_FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
"""Vector units that libraries choose their kernels by."""


@cache
def arithmetic() -> str:
    """Return the library's version, the vector unit in use, and those that the processor has.

    Example:
        `torch 2.5.1, AVX2, cpu avx2+avx512f+fma`. Two processes with the same result, settings and
        data compute the same bits. `ATEN_CPU_CAPABILITY` selects another unit.

    """
    used = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {used}, cpu {_features() or 'unknown'}"


def _features() -> str:
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return ""
    named = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    there = set(named.partition(":")[2].split())
    return "+".join(name for name in _FEATURES if name in there)
