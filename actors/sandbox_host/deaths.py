"""Whose fault a machine's death is: the guest's own, the host's, or somebody's from outside."""

import asyncio
import contextlib
from collections import deque

from penstock.actors.runtime.out_of_memory import OutOfMemoryWatch
from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.sandbox import Sandbox
from penstock.messages.errors import NotFoundError

SETTLE_S = 0.5
"""Time for the neighbors of a dead machine to show whether they died, too."""
NEIGHBOR_S = 5.0
"""Deaths of several machines within this time are the host's."""


class Deaths:
    """The machines of one host that died or hung in use."""

    def __init__(self) -> None:
        self.memory = OutOfMemoryWatch()
        self._last: deque[tuple[str, float]] = deque(maxlen=64)
        """Lease, and when it died."""

    async def is_own(self, lease_id: str, pool: Pool) -> bool:
        """Return whether a machine that died ended by itself, alone of all on this host.

        One that was killed by a signal from outside, out of memory excepted, did not.
        """
        try:
            machine = pool.lease(lease_id).sandbox
        except NotFoundError:  # Its lease is over: nobody's death.
            return False
        now = asyncio.get_running_loop().time
        died_at = now()
        self._last.append((lease_id, died_at))
        await asyncio.sleep(SETTLE_S)
        if _was_killed(machine) and not self.memory.has_risen():
            return False
        has_neighbor = any(
            other != lease_id and abs(at - died_at) <= NEIGHBOR_S for other, at in self._last
        )
        return not has_neighbor and not _others_dead(pool, lease_id)


def _was_killed(machine: Sandbox) -> bool:
    return bool(getattr(machine, "was_killed", False))


def _others_dead(pool: Pool, lease_id: str) -> bool:
    for other in pool.lease_ids() - {lease_id}:
        with contextlib.suppress(NotFoundError):
            if not getattr(pool.lease(other).sandbox, "alive", True):
                return True
    return False
