"""Which host gets a group's machines: pure bookkeeping, no task, no clock and no bus of its own.

```
 place(group) ─▶ has it a host? ── yes ─▶ the same host, renewed
                   │ no
                   ├─▶ of two hosts that hold its image the emptier, if below the soft cap
                   ├─▶ of any two hosts the emptier, if it has room; it holds the image then
                   └─▶ any host with room, else `FleetFullError`: the asker waits, asks again
```
A group is placed as a unit: its machines share one image and begin alike, so a host pages that
image in once. The soft cap keeps holders of popular images from becoming hot spots.
"""

import random
from collections import Counter

import msgspec

from penstock.messages.errors import QueueFullError

SOFT_CAP = 1.08
"""A holder is preferred as long as its load is at most this multiple of its share of the whole."""
HOST_SILENCE_S = 5.0


class FleetFullError(QueueFullError):
    """No host has room now, or the holder's quota is used up; ask again later."""


class Host(msgspec.Struct):
    """A sandbox host, as the scheduler sees it."""

    name: str
    num_slots: int
    num_live: int = 0
    """As it last reported."""
    num_placed: int = 0
    """Of groups that were placed here and have not ended."""
    seen_at: float = 0.0

    @property
    def load(self) -> int:
        """Machines that it has or will have; a report lags behind, or knows of others."""
        return max(self.num_live, self.num_placed)

    def has_room(self, num_machines: int) -> bool:
        """Tell whether a group fits."""
        return self.load + num_machines <= self.num_slots


class Placement(msgspec.Struct):
    """Room that a group has."""

    host: str
    holder: str
    num_machines: int
    lease_s: float
    expires_at: float
    has_image: bool


class Fleet:
    """Places groups on hosts.

    Args:
        rng: Draws the candidates.
        quota: Most machines that one holder may have placed; 0 for no bound.

    """

    def __init__(self, rng: random.Random, *, quota: int = 0) -> None:
        self._rng = rng
        self._quota = quota
        self._hosts: dict[str, Host] = {}
        self._names: list[str] = []
        """The keys of `_hosts`, to draw from."""
        self._holders: dict[str, list[str]] = {}
        """Image -> names of the hosts that hold it."""
        self._placements: dict[str, Placement] = {}
        self._by_holder: Counter[str] = Counter()
        self._num_slots = 0
        self._num_placed = 0

    @property
    def num_hosts(self) -> int:
        """Hosts that report."""
        return len(self._names)

    @property
    def num_placed(self) -> int:
        """Machines that have room."""
        return self._num_placed

    def report(
        self, name: str, *, num_slots: int, num_live: int, images: list[str], now: float
    ) -> None:
        """Take in what a host says of itself."""
        host = self._hosts.get(name)
        if host is None:
            host = self._hosts[name] = Host(name=name, num_slots=0)
            self._names.append(name)
        self._num_slots += num_slots - host.num_slots
        host.num_slots, host.num_live, host.seen_at = num_slots, num_live, now
        for image in images:
            self._hold(image, name)

    def place(  # noqa: PLR0913
        self,
        group_id: str,
        *,
        num_machines: int,
        image: str,
        holder: str,
        lease_s: float,
        now: float,
    ) -> Placement:
        """Return the room of a group, and renew it.

        Raises:
            FleetFullError: No host has room for all of it, or the quota is used up.
            ValueError: A group of no machines.

        """
        placement = self._placements.get(group_id)
        if placement is None:
            placement = self._new(num_machines, image, holder, lease_s)
            self._placements[group_id] = placement
        placement.expires_at = now + placement.lease_s
        return placement

    def _new(self, num_machines: int, image: str, holder: str, lease_s: float) -> Placement:
        if num_machines < 1:
            raise ValueError(f"num_machines: expected at least 1, got {num_machines}")
        if self._quota and self._by_holder[holder] + num_machines > self._quota:
            raise FleetFullError(f"{holder}: {num_machines} more exceed its quota of {self._quota}")
        host = self._choose_holder(image, num_machines)
        has_image = host is not None
        host = host or self._choose_any(num_machines)
        host.num_placed += num_machines
        self._num_placed += num_machines
        self._by_holder[holder] += num_machines
        if image:
            self._hold(image, host.name)
        return Placement(host.name, holder, num_machines, lease_s, 0.0, has_image)

    def _choose_holder(self, image: str, num_machines: int) -> Host | None:
        names = self._holders.get(image, ()) if image else ()
        share = SOFT_CAP * self._num_placed / max(1, self._num_slots)
        for host in self._draw_two(names):
            if host.has_room(num_machines) and host.load <= share * host.num_slots:
                return host
        return None

    def _choose_any(self, num_machines: int) -> Host:
        for host in self._draw_two(self._names):
            if host.has_room(num_machines):
                return host
        for host in self._hosts.values():
            if host.has_room(num_machines):
                return host
        raise FleetFullError(f"no room for {num_machines} machines on {self.num_hosts} hosts")

    def _draw_two(self, names: "list[str] | tuple[str, ...]") -> list[Host]:
        """Return two hosts drawn at random, the emptier one first."""
        if not names:
            return []
        pair = [self._hosts[names[self._rng.randrange(len(names))]] for _ in range(2)]
        return sorted(pair, key=lambda host: host.load / host.num_slots)

    def _hold(self, image: str, name: str) -> None:
        holders = self._holders.setdefault(image, [])
        if name not in holders:
            holders.append(name)

    def release(self, group_id: str) -> None:
        """Give a group's room back; twice does nothing."""
        placement = self._placements.pop(group_id, None)
        if placement is None:
            return
        self._num_placed -= placement.num_machines
        self._by_holder[placement.holder] -= placement.num_machines
        host = self._hosts.get(placement.host)
        if host is not None:
            host.num_placed -= placement.num_machines

    def expire(self, now: float) -> int:
        """Forget hosts that fell silent and groups that nobody renewed; return how many of both.

        A group whose host is gone is placed anew when it is asked for again.
        """
        silent = {h.name for h in self._hosts.values() if h.seen_at + HOST_SILENCE_S < now}
        late = [
            group_id
            for group_id, placement in self._placements.items()
            if placement.expires_at <= now or placement.host in silent
        ]
        for group_id in late:
            self.release(group_id)
        for name in silent:
            self._num_slots -= self._hosts.pop(name).num_slots
            self._names.remove(name)
            for holders in self._holders.values():
                if name in holders:
                    holders.remove(name)
        return len(silent) + len(late)
