"""Devices on which a policy computes (setting `trainer.device`)."""

import logging
import os
from typing import Any

import torch

from penstock.messages.errors import PenstockError

log = logging.getLogger(__name__)

_CUBLAS_WORKSPACE = ":4096:8"
"""Fixed workspace for cuBLAS, which may otherwise sum in a different order in every run."""


class DeviceUnavailableError(PenstockError, RuntimeError):
    """A setting names a device that is not available; the text says what is missing."""


def check_device(name: str, setting: str) -> None:
    """Check that a device is available.

    Args:
        name: One of `DEVICES`.
        setting: Setting that names the device, for the error.

    Raises:
        DeviceUnavailableError: It is not available.

    """
    if name == "cpu":
        return
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch, built for CUDA {built}, finds no device" if built else "torch has no CUDA"
        raise DeviceUnavailableError(f"{setting}: expected 'cpu', got 'cuda': {why}; `nvidia-smi`")


def open_device(name: str, setting: str, index: int = 0) -> torch.device:
    """Return a device that gives the same bits in every run.

    For CUDA this changes settings of the whole process: deterministic algorithms of torch, and
    float32 products without TF32.

    Args:
        name: One of `DEVICES`.
        setting: Setting that names the device, for the error.
        index: Index among the CUDA devices that this process sees.

    Raises:
        DeviceUnavailableError: It is not available.

    """
    check_device(name, setting)
    if name == "cpu":
        return torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    # Our kernels write all of their outputs, so filling them first only adds a launch to each.
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False
    torch.set_float32_matmul_precision("highest")
    if index >= (num_found := torch.cuda.device_count()):
        expected = f"expected one GPU per process on this host, at least {index + 1} in all"
        raise DeviceUnavailableError(f"{setting}: {expected}, this process sees {num_found}")
    torch.cuda.set_device(index)
    log.info("%s: GPU %d of %d", setting, index, num_found)
    return torch.device("cuda", index)


def copied_to(device: torch.device, value: torch.Tensor) -> torch.Tensor:
    """Copy a weight or optimizer state to a device.

    Scalars stay on the host, where AdamW counts its steps.
    """
    return value.clone() if value.dim() == 0 else value.to(device, copy=True)


def fix_threads(num_threads: int) -> None:
    """Fix torch's thread count in the calling thread; the bits of results depend on it."""
    # At its first torch operation, a thread adopts the count that any thread set last. So let this
    # be that operation; otherwise another thread's count could replace ours later.
    torch.get_num_threads()
    torch.set_num_threads(num_threads)
