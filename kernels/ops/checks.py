"""Checks of arguments: shapes and dtypes immediately, values on a GPU asynchronously.

Reading a value of a CUDA tensor makes the host wait for all work queued before it. A check of
values on a GPU therefore only queues a copy of the smallest and largest value, and kernels skip
elements that would be outside their arrays. A failed check is raised by the next check after the
copy has arrived, or by `raise_deferred_errors`.
"""

import threading
from collections import deque
from typing import NamedTuple

import torch

from penstock.kernels.backend import KernelArgumentError, KernelBackend

# Alignment that kernels need, because they read 16 bytes at once. PyTorch aligns allocations to
# more, but a view may start anywhere.
_ALIGNED_BYTES = 16


def check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]
) -> torch.Tensor:
    """Return the tensor, contiguous and aligned, if it has the shape (None: any size) and dtype.

    Raises:
        KernelArgumentError: Shape or dtype differ.

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
    # Backends see no gradients and no strides.
    tensor = tensor.detach().contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNED_BYTES else tensor


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raise KernelArgumentError unless low <= value <= high."""
    if not low <= value <= high:
        raise KernelArgumentError(f"{name}: expected {low}..{high}, got {value}")


NUM_PENDING_MAX = 256
"""Maximum number of pending checks; beyond it, the oldest is waited for."""


class _Check(NamedTuple):
    name: str
    low: int
    high: int
    found: torch.Tensor
    """Smallest and largest value [2], on the host."""
    arrived: torch.cuda.Event | None = None
    """Event after which `found` is valid; None if it is already."""

    def compare(self) -> None:
        smallest, largest = (int(bound) for bound in self.found)
        if smallest < self.low or largest > self.high:
            got = smallest if smallest == largest else f"{smallest}..{largest}"
            raise KernelArgumentError(f"{self.name}: expected {self.low}..{self.high}, got {got}")


class _Pending:
    """Pending checks of all threads, in call order."""

    def __init__(self) -> None:
        self._checks: deque[_Check] = deque()
        self._lock = threading.Lock()

    def add(self, check: _Check) -> None:
        """Evaluate the checks that have arrived, then queue another one."""
        self.read(keep=NUM_PENDING_MAX - 1)
        with self._lock:
            self._checks.append(check)

    def read(self, keep: int) -> None:
        """Evaluate the checks that have arrived, and wait for the oldest until `keep` are left."""
        with self._lock:
            while self._checks:
                arrived = self._checks[0].arrived
                if arrived is not None and not arrived.query():
                    if len(self._checks) <= keep:
                        return
                    arrived.synchronize()
                # Removed before it raises, so that each failure is reported once.
                self._checks.popleft().compare()


_PENDING = _Pending()


def check_values(
    name: str, values: torch.Tensor, low: int, high: int, backend: KernelBackend | None = None
) -> None:
    """Check that integers lie in low..high.

    Args:
        name: Name of the argument, for the error text.
        values: Integer tensor.
        low: Smallest allowed value.
        high: Largest allowed value.
        backend: Backend of the call, which may defer checks as on a GPU.

    Raises:
        KernelArgumentError: A value is out of range; on a GPU, in this or an earlier check.

    """
    if not values.numel():
        return
    found = torch.stack(values.aminmax())
    if values.is_cuda:
        # Recorded on the stream of the copy: once the event has passed, the host's copy is valid.
        host = found.to("cpu", non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(values.device))
        _PENDING.add(_Check(name, low, high, host, arrived))
    elif backend is not None and backend.defers_checks:
        _PENDING.add(_Check(name, low, high, found))
    else:
        _Check(name, low, high, found).compare()


def raise_deferred_errors() -> None:
    """Wait for all pending checks of values on a GPU.

    Raises:
        KernelArgumentError: A check failed; the results of its call must not be used.

    """
    _PENDING.read(keep=0)
