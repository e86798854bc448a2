"""Compilation of the CUDA sources by NVRTC, and launch of their kernels, both through CuPy.

Importing this module needs neither CUDA nor CuPy. CuPy caches what it compiled for each kind of
GPU. Sources include no header, since NVRTC has none.

To add a kernel, write its source in `src/`, its call in `backend.py`, and its name in
`tests/simt/shim.py`.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from penstock.kernels.backend import KernelUnavailableError

FOLDER = Path(__file__).parent / "src"
_FLAGS = ("-std=c++17",)

Argument = torch.Tensor | np.generic | None
"""Kernel argument: a tensor is passed as a pointer, None as a null pointer, a NumPy scalar by
value."""


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
    _cupy()


def device_name() -> str:
    """Return name and number of the GPUs visible to this process; requires `check_cuda`."""
    return f"{torch.cuda.get_device_name()} x {torch.cuda.device_count()}"


def launch_cuda(name: str, grid: tuple[int, int], num_threads: int, *arguments: Argument) -> None:
    """Launch on PyTorch's current stream, in order with its other work; see `Launch`."""
    cupy = _cupy()
    device = next(a.device for a in arguments if isinstance(a, torch.Tensor))
    stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream(device))
    with cupy.cuda.Device(device.index), stream:
        cuda_kernel(name, device.index)(
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
def cuda_kernel(name: str, device: int) -> Callable[..., None]:
    """Return the kernel `source.kernel`, loaded into the current device's context.

    Raises:
        KernelUnavailableError: CuPy or its compiler is missing, or the source does not compile.

    """
    source, kernel = name.split(".")
    try:
        return _cuda_module(source, device).get_function(kernel)
    # CuPy raises errors of NVRTC, of the driver and of the loader of libraries, all of its own.
    except Exception as error:
        raise KernelUnavailableError(f"CUDA kernels: {source}.cu: {error}") from error


@cache
def _cuda_module(source: str, _device: int) -> Any:
    code = (FOLDER / f"{source}.cu").read_text(encoding="utf-8")
    return _cupy().RawModule(code=code, options=_FLAGS)


def _cuda_argument(argument: Argument) -> np.generic:
    # A bare pointer is safe although the launch is asynchronous: PyTorch's allocator reuses a freed
    # tensor's memory only for later work on the same stream.
    if argument is None:
        return np.uint64(0)
    if isinstance(argument, torch.Tensor):
        return np.uint64(argument.data_ptr())
    return argument
