"""Checks of arguments: shapes and dtypes at once, values on a GPU without waiting for them.

To read a value of a CUDA tensor the host waits for everything queued before it. So there a check
only queues its two figures for copying; the kernel leaves out what would lie outside its arrays.
What was wrong is raised by the next check that finds the figures there, or by
`raise_deferred_errors`.
"""

import threading
from collections import deque
from typing import NamedTuple

import torch

from penstock.kernels.backend import KernelArgumentError, KernelBackend

FLOATS = (torch.float32, torch.bfloat16)
_ALIGNED_BYTES = 16
"""Kernels read this much at once; torch allocates more, but a view may begin anywhere."""


def check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]
) -> torch.Tensor:
    """Return the tensor, contiguous and aligned, if its shape (None: any size) and dtype fit.

    Raises:
        KernelArgumentError: they do not.

    """
    fits = len(shape) == tensor.dim() and all(
        want in {None, got} for want, got in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype not in dtypes:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        names = " or ".join(str(dtype) for dtype in dtypes)
        raise KernelArgumentError(
            f"{name}: expected [{sizes}] of {names}, got {list(tensor.shape)} of {tensor.dtype}"
        )
    tensor = tensor.detach().contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNED_BYTES else tensor


def check_multiple(name: str, size: int, of: int) -> None:
    """Raise KernelArgumentError unless a dimension is a positive multiple."""
    if size <= 0 or size % of:
        raise KernelArgumentError(f"{name}: expected a positive multiple of {of}, got {size}")


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raise KernelArgumentError unless low <= value <= high."""
    if not low <= value <= high:
        raise KernelArgumentError(f"{name}: expected {low}..{high}, got {value}")


NUM_PENDING_MAX = 256
"""Checks not yet read; beyond, the oldest is waited for."""


class _Check(NamedTuple):
    name: str
    low: int
    high: int
    found: torch.Tensor
    """[2] on the host: smallest and largest."""
    arrived: torch.cuda.Event | None = None
    """None: they are there."""

    def compare(self) -> None:
        smallest, largest = (int(bound) for bound in self.found)
        if smallest < self.low or largest > self.high:
            got = smallest if smallest == largest else f"{smallest}..{largest}"
            raise KernelArgumentError(f"{self.name}: expected {self.low}..{self.high}, got {got}")


class _Pending:
    """Checks in the order of their calls, whatever the thread."""

    def __init__(self) -> None:
        self._checks: deque[_Check] = deque()
        self._lock = threading.Lock()

    def add(self, check: _Check) -> None:
        """Read what has arrived, then queue one more."""
        self.read(keep=NUM_PENDING_MAX - 1)
        with self._lock:
            self._checks.append(check)

    def read(self, keep: int) -> None:
        """Compare those that have arrived, and wait for the oldest until `keep` are left."""
        with self._lock:
            while self._checks:
                arrived = self._checks[0].arrived
                if arrived is not None and not arrived.query():
                    if len(self._checks) <= keep:
                        return
                    arrived.synchronize()
                self._checks.popleft().compare()


_PENDING = _Pending()


def check_values(
    name: str, values: torch.Tensor, low: int, high: int, backend: KernelBackend | None = None
) -> None:
    """Check that integers lie in low..high.

    Args:
        name: of the argument.
        values: integers.
        low: the least that is allowed.
        high: the largest.
        backend: the caller's, which may defer checks as a GPU does.

    Raises:
        KernelArgumentError: A value outside; for a GPU, in an earlier check.

    """
    if not values.numel():
        return
    found = torch.stack(values.aminmax())
    if values.is_cuda:
        host = found.to("cpu", non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(values.device))
        _PENDING.add(_Check(name, low, high, host, arrived))
    elif backend is not None and backend.defers_checks:
        _PENDING.add(_Check(name, low, high, found))
    else:
        _Check(name, low, high, found).compare()


def raise_deferred_errors() -> None:
    """Wait for every check of values on a GPU.

    Raises:
        KernelArgumentError: One failed: what its call gave is not to be used.

    """
    _PENDING.read(keep=0)
