"""The compiled `decode.c`."""

import ctypes
from pathlib import Path

from penstock.kernels.native import load_library


def decode_library() -> ctypes.CDLL | None:
    """Compile or load the library; None without a compiler."""
    return load_library(Path(__file__).with_name("decode.c"))
