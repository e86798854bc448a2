"""Holds the idle machines of one image and the leases that wait for a machine.

An image pool boots nothing itself: the reconciler asks how many machines are missing, boots them
and reports the result. A failed boot fails the oldest pending lease and delays the next boot.
"""

import logging
import math
from collections import deque

from penstock.envs.microvm.pool.lease import PendingLease
from penstock.envs.sandbox import ImageAbsent, Machine, SandboxBackend, SandboxError

log = logging.getLogger(__name__)

BACKOFF_S_MAX = 5.0
"""Maximum delay between boots that fail."""


class ImagePool:
    """Idle machines and pending leases of one image and machine size.

    Args:
        backend: Backend that boots the machines.
        size: Idle machines to keep ready.
        num_slots: Number of default machines that one of these counts as.

    """

    def __init__(self, backend: SandboxBackend, size: int, num_slots: int = 1) -> None:
        self.num_slots = num_slots
        self.backend = backend
        self.size = size
        self.idle: deque[Machine] = deque()
        self.num_booting = 0
        self.retry_at = 0.0
        self.is_absent = False
        """Whether the image is gone; the next request opens it again."""
        self._pending: dict[str, PendingLease] = {}
        """Leases that are neither granted nor withdrawn, oldest first."""
        self._backoff_s = 0.0

    @property
    def in_use(self) -> bool:
        """Whether a machine is booting or a lease is pending."""
        return self.num_booting > 0 or self.num_pending > 0

    @property
    def num_pending(self) -> int:
        """Number of leases requested and not granted yet."""
        return len(self._pending)

    @property
    def num_unmet(self) -> int:
        """Number of pending leases without an idle or booting machine."""
        return max(0, self.num_pending - len(self.idle) - self.num_booting)

    @property
    def num_missing(self) -> int:
        """Number of machines to boot, for unmet leases and to keep `size` ready."""
        return max(0, self.size + self.num_pending - len(self.idle) - self.num_booting)

    @property
    def pending_since(self) -> float:
        """Event-loop time when the oldest pending lease was requested; infinite without one."""
        return next((pending.requested_at for pending in self._pending.values()), math.inf)

    def request(self, lease_id: str, lease_s: float) -> PendingLease:
        """Return the pending lease for an id; repeated requests share one."""
        if lease_id not in self._pending:
            self._pending[lease_id] = PendingLease(lease_id, lease_s)
        return self._pending[lease_id]

    def withdraw(self, pending: PendingLease) -> None:
        """Drop a pending lease after its last client has given up."""
        # `done` because the last client cancels it; `is` because a new request may have taken the
        # id.
        if pending.granted.done() and self._pending.get(pending.lease_id) is pending:
            del self._pending[pending.lease_id]

    def pop_pending(self) -> PendingLease | None:
        """Remove and return the oldest pending lease, or None."""
        for lease_id in self._pending:
            return self._pending.pop(lease_id)
        return None

    def opened(self, backend: SandboxBackend) -> None:
        """Switch to a newly opened backend of an image that is available again."""
        self.backend, self.is_absent, self.retry_at = backend, False, 0.0

    def booted(self, machine: Machine) -> None:
        """Add a machine that has booted to the idle ones."""
        self._backoff_s = 0.0
        self.idle.append(machine)

    def boot_failed(self, error: SandboxError, now: float) -> None:
        """Fail the oldest pending lease, or all if the image is gone; delay the next boot."""
        # One lease only: if the fault is temporary, the others get a machine after the delay.
        if isinstance(error, ImageAbsent):
            self.is_absent = True
            self.refuse(error)
        self._backoff_s = min(BACKOFF_S_MAX, self._backoff_s * 2 or 0.1)
        self.retry_at = now + self._backoff_s
        log.warning("boot failed, next one in %.1f s: %s", self._backoff_s, error)
        if (pending := self.pop_pending()) is not None:
            pending.granted.set_exception(error)

    def refuse(self, error: SandboxError) -> None:
        """Fail all pending leases."""
        while (pending := self.pop_pending()) is not None:
            pending.granted.set_exception(error)

    def take_dead(self) -> list[Machine]:
        """Remove and return the idle machines that have died."""
        dead = [machine for machine in self.idle if not machine.alive]
        for machine in dead:
            self.idle.remove(machine)
        return dead
