"""Machines of one image that nobody has yet, and who waits for one.

A stock boots nothing by itself: the pool asks how many are missing, boots them, and says how that
ended. A boot that fails is told to the oldest waiter, and the next one waits a little.
"""

import math
from collections import deque

from penstock.envs.microvm.pool.lease import Want
from penstock.envs.sandbox import Backend, ImageAbsent, Machine, SandboxError

BACKOFF_S_MAX = 5.0


class Stock:
    """One image's.

    Args:
        backend: Boots its machines.
        size: Idle machines to keep.

    """

    def __init__(self, backend: Backend, size: int) -> None:
        self.backend = backend
        self.size = size
        self.idle: deque[Machine] = deque()
        self.num_booting = 0
        self.retry_at = 0.0
        self.is_absent = False
        """Its image is gone: it is opened anew for whoever asks next."""
        self._wants: dict[str, Want] = {}
        """Those that were neither granted nor withdrawn, in the order of asking."""
        self._backoff_s = 0.0

    @property
    def in_use(self) -> bool:
        """Whether a machine is on the way, or somebody waits for one."""
        return self.num_booting > 0 or self.num_waiting > 0

    @property
    def num_waiting(self) -> int:
        """Leases that were asked for and not given."""
        return len(self._wants)

    @property
    def num_unmet(self) -> int:
        """Leases that were asked for and that no machine here, or on the way, is for."""
        return max(0, self.num_waiting - len(self.idle) - self.num_booting)

    @property
    def num_missing(self) -> int:
        """Machines to boot: those unmet, and those to keep ready."""
        return max(0, self.size + self.num_waiting - len(self.idle) - self.num_booting)

    @property
    def waits_since(self) -> float:
        """When the oldest wish came, of the event loop's time; infinite if there is none."""
        return next((want.asked_at for want in self._wants.values()), math.inf)

    def want(self, lease_id: str, lease_s: float) -> Want:
        """Return the wish for a lease, made once however often it is asked for."""
        if lease_id not in self._wants:
            self._wants[lease_id] = Want(lease_id, lease_s)
        return self._wants[lease_id]

    def withdraw(self, want: Want) -> None:
        """Drop a wish that its last asker has given up."""
        if want.given.done() and self._wants.get(want.lease_id) is want:
            del self._wants[want.lease_id]

    def take_want(self) -> Want | None:
        """Take the oldest wish out, to be granted or refused."""
        for lease_id in self._wants:
            return self._wants.pop(lease_id)
        return None

    def opened(self, backend: Backend) -> None:
        """Take in the backend of an image that is there again."""
        self.backend, self.is_absent, self.retry_at = backend, False, 0.0

    def booted(self, machine: Machine) -> None:
        """Take in a machine."""
        self._backoff_s = 0.0
        self.idle.append(machine)

    def boot_failed(self, error: SandboxError, now: float) -> None:
        """Tell the oldest waiter, all where the image is gone, and wait before the next boot."""
        if isinstance(error, ImageAbsent):
            self.is_absent = True
            self.refuse(error)
        self._backoff_s = min(BACKOFF_S_MAX, self._backoff_s * 2 or 0.1)
        self.retry_at = now + self._backoff_s
        if (want := self.take_want()) is not None:
            want.given.set_exception(error)

    def refuse(self, error: SandboxError) -> None:
        """Tell everybody who waits."""
        while (want := self.take_want()) is not None:
            want.given.set_exception(error)

    def take_dead(self) -> list[Machine]:
        """Give up the idle machines that ended by themselves."""
        dead = [machine for machine in self.idle if not machine.alive]
        for machine in dead:
            self.idle.remove(machine)
        return dead
