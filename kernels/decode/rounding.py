"""Rounding to what MXFP8 can hold: in C, or by the reference where there is no compiler."""

import ctypes

import numpy as np

from penstock.kernels.decode.library import decode_library
from penstock.kernels.reference.quantize import MX_BLOCK, mxfp8_dequantize, mxfp8_rows


def round_mxfp8(values: np.ndarray) -> None:
    """Round float32 [..., K] in place, in blocks of 32 along K, a multiple of 32; C-contiguous."""
    assert values.dtype == np.float32
    assert values.flags.c_contiguous
    assert values.shape[-1] % MX_BLOCK == 0
    library = decode_library()
    if library is None:
        rows = values.reshape(-1, values.shape[-1])
        rows[...] = mxfp8_dequantize(*mxfp8_rows(rows))
    else:
        pointer = ctypes.c_void_p(values.ctypes.data)
        library.penstock_round_mxfp8(pointer, ctypes.c_int64(values.size))
