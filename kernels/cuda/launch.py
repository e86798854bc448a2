"""Starts kernels: on the GPU through cupy, or on the CPU through the SIMT shim.

Both take the same arguments, so the code that computes grids and passes pointers is checked without
a GPU. Importing this needs neither CUDA nor cupy.
"""

import ctypes
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch

from penstock.kernels.cuda.compiler import compile_cubin
from penstock.kernels.cuda.sources import FOLDER, REGISTERS_MAX, source_bytes
from penstock.kernels.errors import KernelUnavailableError
from penstock.kernels.native import build

Argument = torch.Tensor | np.generic | None
"""A tensor goes as its pointer, None as a null pointer, a numpy scalar as itself."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHIM_FLAGS = (
    *("-x", "c++", "-std=c++17", "-O2", "-march=native", "-ffp-contract=off", "-Wno-psabi"),
    *("-shared", "-fPIC"),
)


class Launch(Protocol):
    """Starts one kernel."""

    def __call__(
        self, name: str, grid: tuple[int, int], num_threads: int, *arguments: Argument
    ) -> None:
        """Start kernel `source.kernel` on a grid of blocks of threads.

        Raises:
            KernelUnavailableError: what it takes is missing.

        """
        ...


def launch_cuda(name: str, grid: tuple[int, int], num_threads: int, *arguments: Argument) -> None:
    """Start on torch's current stream; see `Launch`."""
    cupy = _cupy()
    device = next(a.device for a in arguments if isinstance(a, torch.Tensor))
    with cupy.cuda.Device(device.index):
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream(device).cuda_stream)
        with stream:
            _cuda_kernel(name, device.index)(
                (*grid, 1), (num_threads, 1, 1), tuple(map(_cuda_argument, arguments))
            )


def launch_simt(name: str, grid: tuple[int, int], num_threads: int, *arguments: Argument) -> None:
    """Run on the CPU, one thread after another; see `Launch`."""
    source, kernel = name.split(".")
    run = getattr(_simt_library(source), f"simt_{kernel}")
    values = [_host_value(argument) for argument in arguments]
    pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
    has_hung = run((ctypes.c_uint * 2)(*grid), ctypes.c_uint(num_threads), pointers)
    assert not has_hung, f"{name}: threads wait for a barrier that others never reach"


@cache
def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise KernelUnavailableError(
            "CUDA kernels need cupy: pip install 'penstock[cuda]'"
        ) from error
    return cupy


@cache
def _cuda_kernel(name: str, device: int) -> Callable[..., None]:
    """Load a kernel into the current device's context."""
    source, kernel = name.split(".")
    return _cuda_module(source, device).get_function(kernel)


@cache
def _cuda_module(source: str, device: int) -> Any:
    return _cupy().RawModule(path=str(compile_cubin(source)))


def _cuda_argument(argument: Argument) -> Any:
    """Pass tensors through DLPack, as bits: cupy has no bfloat16."""
    if argument is None:
        return np.uint64(0)
    if isinstance(argument, torch.Tensor):
        return _cupy().from_dlpack(argument.detach().view(_BITS[argument.element_size()]))
    return argument


def _host_value(argument: Argument) -> np.ndarray:
    if argument is None:
        return np.array(0, np.uint64)
    if isinstance(argument, torch.Tensor):
        return np.array(argument.data_ptr(), np.uint64)
    return np.array(argument)


@cache
def _simt_library(source: str) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise KernelUnavailableError("the SIMT shim needs a C++ compiler: g++ or clang++")
    command = [compiler, *_SHIM_FLAGS, f"-I{FOLDER}", "-"]
    library = build(command, f"{source}-simt.so", source_bytes(source), _simt_unit(source))
    if library is None:
        raise KernelUnavailableError(f"the SIMT shim does not compile {source}.cu; see the log")
    return ctypes.CDLL(str(library))


def _simt_unit(source: str) -> bytes:
    """Return the translation unit: the shim, the source, and one entry a kernel."""
    entries = "".join(f"SIMT_ENTRY({kernel})\n" for kernel in REGISTERS_MAX[source])
    return f'#include "simt.h"\n#include "{source}.cu"\n{entries}'.encode()
