"""Runs the CUDA sources on a CPU, threads as fibers: same grids and arguments as on a GPU."""

import ctypes
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import torch

from penstock.kernels.cuda.backend import CudaBackend
from penstock.kernels.cuda.launch import FOLDER, Argument
from penstock.kernels.native import build

_OWN = Path(__file__).parent
_FLAGS = (
    *("-x", "c++", "-std=c++17", "-O2", "-march=native", "-ffp-contract=off", "-Wno-psabi"),
    *("-shared", "-fPIC"),
)
COMPILER = shutil.which("g++") or shutil.which("clang++")
KERNELS = {
    "routes": ["routes_pack"],
    "delta": [f"delta_apply_{size}" for size in (1, 2, 4)],
}
"""By source, its kernels."""


def launch_simt(name: str, grid: tuple[int, int], num_threads: int, *arguments: Argument) -> None:
    """Run one thread after another; see `Launch`."""
    source, kernel = name.split(".")
    run = getattr(_simt_library(source), f"simt_{kernel}")
    values = [_host_value(argument) for argument in arguments]
    pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
    has_hung = run((ctypes.c_uint * 2)(*grid), ctypes.c_uint(num_threads), pointers)
    assert not has_hung, f"{name}: threads wait for a barrier that others never reach"


def _host_value(argument: Argument) -> np.ndarray:
    if argument is None:
        return np.array(0, np.uint64)
    if isinstance(argument, torch.Tensor):
        return np.array(argument.data_ptr(), np.uint64)
    return np.array(argument)


@cache
def _simt_library(source: str) -> ctypes.CDLL:
    assert COMPILER is not None, "the SIMT shim needs g++ or clang++"
    command = [COMPILER, *_FLAGS, f"-I{_OWN}", f"-I{FOLDER}", "-"]
    content = b"".join(path.read_bytes() for path in (FOLDER / f"{source}.cu", _OWN / "simt.h"))
    library = build(command, f"{source}-simt.so", content, _simt_unit(source))
    assert library is not None, f"the SIMT shim does not compile {source}.cu; see the log"
    return ctypes.CDLL(str(library))


def _simt_unit(source: str) -> bytes:
    """Return the translation unit: the shim, the source, and one entry per kernel."""
    entries = "".join(f"SIMT_ENTRY({kernel})\n" for kernel in KERNELS[source])
    return f'#include "simt.h"\n#include "{source}.cu"\n{entries}'.encode()


SIMT = CudaBackend(launch_simt, "cpu")
