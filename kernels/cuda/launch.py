"""Compilation of CUDA sources for sm_90a, and launch of their kernels through CuPy.

Importing this module needs neither CUDA nor CuPy.

To add a kernel, write its source in `src/` and its call in `backend.py`, and list its registers in
`tests/simt/registers.py`, which the build is checked against.
"""

import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from penstock.kernels.backend import KernelUnavailableError
from penstock.kernels.native import build

FOLDER = Path(__file__).parent / "src"
NO_NVCC = "CUDA kernels need nvcc: none on PATH nor under CUDA_HOME"
# Compiler flags. `-fmad=false` because the reference arithmetic fuses only multiply-adds that are
# explicit in the source.
_FLAGS = (
    *("-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-O3"),
    *("-fmad=false", "-Xptxas", "-v"),
)


def source_path(name: str) -> Path:
    """Return the path of a source."""
    return FOLDER / f"{name}.cu"


def source_bytes(name: str) -> bytes:
    """Return the contents of a source and of all headers, for the cache key."""
    headers = sorted(FOLDER.glob("*.cuh"))
    return b"\0".join(path.read_bytes() for path in [source_path(name), *headers])


def find_nvcc() -> str | None:
    """Return the path of nvcc, or None."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")


def compile_cubin(source: str) -> Path:
    """Compile a source unless it is cached, and return the path of the cubin.

    Raises:
        KernelUnavailableError: There is no nvcc, or compilation failed (its output is logged).

    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise KernelUnavailableError(NO_NVCC)
    command = [nvcc, *_FLAGS, f"-I{FOLDER}", str(source_path(source))]
    cubin = build(command, f"{source}.cubin", source_bytes(source))
    if cubin is None:
        raise KernelUnavailableError(
            f"CUDA kernels: nvcc failed to compile {source}.cu; see its output in the log"
        )
    return cubin


Argument = torch.Tensor | np.generic | None
"""Kernel argument: a tensor is passed as a pointer, None as a null pointer, a NumPy scalar by
value."""
_CAPABILITY = (9, 0)


class Launch(Protocol):
    """Function that launches a kernel."""

    def __call__(
        self, name: str, grid: tuple[int, int], num_threads: int, *arguments: Argument
    ) -> None:
        """Launch the kernel `source.kernel` on a grid of thread blocks.

        Raises:
            KernelUnavailableError: A compiler, driver or library is missing.

        """
        ...


def check_cuda() -> None:
    """Check that kernels can be compiled and launched in this process.

    Raises:
        KernelUnavailableError: Something is missing; the text says what and how to get it.

    """
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch, built for CUDA {built}, finds no device" if built else "torch has no CUDA"
        raise KernelUnavailableError(f"CUDA kernels need a GPU: {why}; see `nvidia-smi`")
    # Code for sm_90a runs on no other architecture, not even on later ones.
    if (found := torch.cuda.get_device_capability()) != _CAPABILITY:
        text = ".".join(map(str, found))
        raise KernelUnavailableError(f"CUDA kernels need a Hopper GPU (9.0), got capability {text}")
    _cupy()
    if find_nvcc() is None:
        raise KernelUnavailableError(NO_NVCC)


def device_name() -> str:
    """Return name and number of the GPUs visible to this process; requires `check_cuda`."""
    return f"{torch.cuda.get_device_name()} x {torch.cuda.device_count()}"


def launch_cuda(name: str, grid: tuple[int, int], num_threads: int, *arguments: Argument) -> None:
    """Launch on PyTorch's current stream, in order with its other work; see `Launch`."""
    cupy = _cupy()
    device = next(a.device for a in arguments if isinstance(a, torch.Tensor))
    stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream(device))
    with cupy.cuda.Device(device.index), stream:
        _cuda_kernel(name, device.index)(
            (*grid, 1), (num_threads, 1, 1), tuple(map(_cuda_argument, arguments))
        )


@cache
def _cupy() -> Any:
    try:
        import cupy  # pyright: ignore[reportMissingImports] - an optional dependency
    except ImportError as error:
        raise KernelUnavailableError("CUDA kernels need cupy: pip install -e '.[cuda]'") from error
    return cupy


@cache
def _cuda_kernel(name: str, device: int) -> Callable[..., None]:
    """Load a kernel into the current device's context."""
    source, kernel = name.split(".")
    return _cuda_module(source, device).get_function(kernel)


@cache
def _cuda_module(source: str, device: int) -> Any:
    return _cupy().RawModule(path=str(compile_cubin(source)))


def _cuda_argument(argument: Argument) -> np.generic:
    # A bare pointer is safe although the launch is asynchronous: PyTorch's allocator reuses a freed
    # tensor's memory only for later work on the same stream.
    if argument is None:
        return np.uint64(0)
    if isinstance(argument, torch.Tensor):
        return np.uint64(argument.data_ptr())
    return argument
