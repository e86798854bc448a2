"""Checks of what lies in tensors: at once on the CPU, without waiting on a GPU.

To read a value of a CUDA tensor the host waits for everything queued before it. So there a check
only queues its two figures for copying; the kernel leaves out what would lie outside its arrays.
What was wrong is raised by the next check that finds the figures there, or by
`raise_deferred_errors`.
"""

import threading
from collections import deque
from typing import NamedTuple

import torch

from penstock.kernels.backend import KernelBackend
from penstock.kernels.errors import KernelArgumentError

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
