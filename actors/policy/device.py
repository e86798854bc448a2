"""Where a policy computes: the settings `trainer.device` and `generator.device`."""

import os
from typing import Any

import torch

from penstock.kernels.backend import KernelUnavailableError
from penstock.kernels.cuda.launch import check_cuda
from penstock.messages.errors import PenstockError

_CUBLAS_WORKSPACE = ":4096:8"
"""Without a fixed workspace, cuBLAS may sum in another order from one run to the next."""


class DeviceUnavailableError(PenstockError, RuntimeError):
    """A setting names a device that is not there; the text says what is missing."""


def check_device(name: str, setting: str) -> None:
    """Check that a device is there, with all that computing on it takes.

    Args:
        name: of `DEVICES`.
        setting: that names it, for the error.

    Raises:
        DeviceUnavailableError: It is not.

    """
    if name == "cpu":
        return
    try:
        check_cuda()
    except KernelUnavailableError as error:
        raise DeviceUnavailableError(f"{setting}: expected 'cpu', got 'cuda': {error}") from error


def open_device(name: str, setting: str, index: int = 0) -> torch.device:
    """Return a device that gives the same bits on every run.

    On CUDA this is a matter of the whole process: torch's deterministic algorithms, and float32
    products without TF32.

    Args:
        name: of `DEVICES`.
        setting: that names it, for the error.
        index: of several CUDA devices that this process sees.

    Raises:
        DeviceUnavailableError: It is not there.

    """
    check_device(name, setting)
    if name == "cpu":
        return torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    # Kernels write all of their results; to fill these beforehand is a start more for each.
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False
    torch.set_float32_matmul_precision("highest")
    if index >= (num_found := torch.cuda.device_count()):
        expected = f"expected a GPU of its own for each process of a host, at least {index + 1}"
        raise DeviceUnavailableError(f"{setting}: {expected}, this process sees {num_found}")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def copied_to(device: torch.device, value: torch.Tensor) -> torch.Tensor:
    """Copy a weight or a moment to a device; scalars stay on the host, where AdamW counts steps."""
    return value.clone() if value.dim() == 0 else value.to(device, copy=True)


def fix_threads(num_threads: int) -> None:
    """Fix torch's thread count in the calling thread; bits depend on it.

    At its first operation a thread takes over the count that any thread of the process set last. So
    that comes first here: else another thread's count could come between this one and the work.
    """
    torch.get_num_threads()
    torch.set_num_threads(num_threads)
