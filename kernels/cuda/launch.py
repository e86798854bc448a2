"""Starts kernels on the GPU through cupy. Importing this needs neither CUDA nor cupy.

Compiles a CUDA source for sm_90a, once.

To add a kernel: its source in `src/`, its call in `backend.py`, and its registers in
`tests/simt/registers.py`, to which the build is held.
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
_FLAGS = (
    *("-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-O3"),
    *("-fmad=false", "-Xptxas", "-v"),
)
"""`-fmad=false`: what is fused says so in the source, as the frozen arithmetic demands."""


def source_path(name: str) -> Path:
    """Return the file of a source."""
    return FOLDER / f"{name}.cu"


def source_bytes(name: str) -> bytes:
    """Return everything that a source's result depends on."""
    headers = sorted(FOLDER.glob("*.cuh"))
    return b"\0".join(path.read_bytes() for path in [source_path(name), *headers])


def find_nvcc() -> str | None:
    """Return the path of nvcc, or None."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")


def compile_cubin(source: str) -> Path:
    """Compile one source if it is not cached.

    Raises:
        KernelUnavailableError: there is no nvcc, or it refuses the source (its words are logged).

    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise KernelUnavailableError(NO_NVCC)
    command = [nvcc, *_FLAGS, f"-I{FOLDER}", str(source_path(source))]
    cubin = build(command, f"{source}.cubin", source_bytes(source))
    if cubin is None:
        raise KernelUnavailableError(
            f"CUDA kernels: nvcc does not compile {source}.cu; see the log"
        )
    return cubin


Argument = torch.Tensor | np.generic | None
"""A tensor goes as its pointer, None as a null pointer, a numpy scalar as itself."""
_CAPABILITY = (9, 0)


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


def check_cuda() -> None:
    """Check that kernels can be compiled and started here.

    Raises:
        KernelUnavailableError: Something is missing; the text says what, and how to get it.

    """
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch, built for CUDA {built}, finds no device" if built else "torch has no CUDA"
        raise KernelUnavailableError(f"CUDA kernels need a GPU: {why}; see `nvidia-smi`")
    if (found := torch.cuda.get_device_capability()) != _CAPABILITY:
        text = ".".join(map(str, found))
        raise KernelUnavailableError(f"CUDA kernels need a Hopper GPU (9.0), got capability {text}")
    _cupy()
    if find_nvcc() is None:
        raise KernelUnavailableError(NO_NVCC)


def device_name() -> str:
    """Return the name and the number of the GPUs that this process sees; `check_cuda` passed."""
    return f"{torch.cuda.get_device_name()} x {torch.cuda.device_count()}"


def launch_cuda(name: str, grid: tuple[int, int], num_threads: int, *arguments: Argument) -> None:
    """Start on torch's current stream; see `Launch`."""
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


def _cuda_argument(argument: Argument) -> np.generic:
    """Return what the driver copies: torch's allocator keeps a tensor's memory for its stream."""
    if argument is None:
        return np.uint64(0)
    if isinstance(argument, torch.Tensor):
        return np.uint64(argument.data_ptr())
    return argument
