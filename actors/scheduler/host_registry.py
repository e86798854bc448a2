"""Which host gets a group's machines: pure bookkeeping, no task, no clock and no bus of its own.

```
 place(group) ─▶ has it a host? ── yes ─▶ the same host, renewed
                   │ no
                   ├─▶ of two hosts that hold its image the emptier, if below the soft cap
                   ├─▶ of any two hosts the emptier, if it has room; it holds the image then
                   └─▶ any host with room, else `HostsFullError`: the client waits and retries
```
A group is placed as a unit: its machines share one image and begin alike, so a host pages that
image in once. The soft cap keeps holders of popular images from becoming hot spots. Hosts report
the groups that they hold: room ends with the machines, and a scheduler with empty books (after a
crash) adopts what is there instead of placing it again.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from penstock.messages.errors import QueueFullError
from penstock.messages.requests.scheduler import HeldGroup

SOFT_CAP = 1.08
"""A holder is preferred as long as its load is at most this multiple of its share of the whole."""
HOST_SILENCE_S = 5.0
LEASE_S_MAX = 86400.0


class Host(msgspec.Struct):
    """A sandbox host, as the scheduler sees it."""

    name: str
    num_slots: int = 0
    reserved_slots: int = 0
    """Slots that only grading may have."""
    num_others: int = 0
    """Machines of no group that is placed here, by its last report: a judge's, for example."""
    num_placed: int = 0
    """Machines of the groups that are placed here."""
    seen_at: float = 0.0
    is_silent: bool = False
    """It did not answer a client since its last report: nothing new is placed here."""
    images: set[str] = msgspec.field(default_factory=set[str])
    groups: set[str] = msgspec.field(default_factory=set[str])
    """Ids of the groups that are placed here."""

    @property
    def load(self) -> int:
        """Machines that it has or will have."""
        return self.num_others + self.num_placed

    @property
    def fill(self) -> float:
        """Load as a fraction of what it can hold."""
        return self.load / self.num_slots if self.num_slots else 1.0

    def has_room(self, num_machines: int, *, is_grading: bool) -> bool:
        """Return whether a group fits; what is not grading may fill an empty host alone."""
        reserved = 0 if is_grading or not self.load else self.reserved_slots
        return not self.is_silent and self.load + num_machines + reserved <= self.num_slots


class Placement(msgspec.Struct):
    """Room that a group has: kept for its lease's time, then as long as its host reports it."""

    host: str
    holder: str
    num_machines: int
    lease_s: float
    has_image: bool
    expires_at: float = 0.0
    image: str = ""
    is_held: bool = False
    """Its host has reported machines of it."""


class HostsFullError(QueueFullError):
    """No host has room now, or the holder's quota is used up; retry later."""


class HostRegistry:
    """Places groups on hosts.

    Args:
        rng: Draws the candidates.
        quota: Most machines that one holder may have placed; 0 for no bound.
        quotas: Those of holders that have one of their own.

    """

    def __init__(
        self, rng: random.Random, *, quota: int = 0, quotas: Mapping[str, int] | None = None
    ) -> None:
        self._rng = rng
        self._quota = quota
        self._quotas = quotas or {}
        self.hosts: dict[str, Host] = {}
        """Those that report, by name."""
        self.names: list[str] = []
        """The keys of `hosts`, to draw from."""
        self._holders: defaultdict[str, list[str]] = defaultdict(list)
        """Image -> names of the hosts that hold it."""
        self._placements: dict[str, Placement] = {}
        self._by_holder: Counter[str] = Counter()
        self._num_slots = 0
        self._num_placed = 0

    @property
    def num_hosts(self) -> int:
        """Hosts that report."""
        return len(self.names)

    @property
    def num_placed(self) -> int:
        """Machines that have room."""
        return self._num_placed

    def knows(self, group_id: str) -> bool:
        """Return whether a group has room."""
        return group_id in self._placements

    def report(  # noqa: PLR0913
        self,
        name: str,
        *,
        num_slots: int,
        num_live: int,
        now: float,
        reserved_slots: int = 0,
        images: Sequence[str] = (),
        groups: Sequence[HeldGroup] = (),
    ) -> None:
        """Record a host's report."""
        host = self.hosts.get(name)
        if host is None:
            host = self.hosts[name] = Host(name)
            self.names.append(name)
        self._num_slots += num_slots - host.num_slots
        host.num_slots, host.reserved_slots, host.seen_at = num_slots, reserved_slots, now
        host.is_silent = False
        self._adopt(host, groups, now)
        self._note_images(host, images)
        held = sum(group.num_machines for group in groups if group.group_id in host.groups)
        host.num_others = max(0, num_live - held)

    def _note_images(self, host: Host, images: Sequence[str]) -> None:
        """Record which images a host has ready; those of groups placed there count, too."""
        coming = {self._placements[group_id].image for group_id in host.groups}
        for image in host.images - coming.difference([""]) - set(images):
            host.images.remove(image)
            self._let_go(image, host)
        for image in images:
            self._hold(image, host)

    def _adopt(self, host: Host, groups: Sequence[HeldGroup], now: float) -> None:
        """Renew the groups that a host holds; end those that it no longer holds."""
        for group in groups:
            placement = self._placements.get(group.group_id)
            if placement is None and group.num_machines == 0:
                continue
            if placement is None:
                count = group.num_machines
                placement = Placement(host.name, group.holder, count, 0.0, has_image=True)
                self._keep(group.group_id, placement, host)
            if placement.host == host.name:
                placement.is_held = True
                placement.expires_at = max(placement.expires_at, now + HOST_SILENCE_S)
        ended = host.groups.difference(group.group_id for group in groups)
        for group_id in ended:
            if self._placements[group_id].is_held:
                self.release(group_id)

    def place(  # noqa: PLR0913
        self,
        group_id: str,
        *,
        num_machines: int,
        image: str,
        holder: str,
        lease_s: float,
        now: float,
        avoid: str = "",
        is_grading: bool = False,
    ) -> Placement:
        """Return the room of a group, and renew it.

        Args:
            group_id: Whose room; a repeat gets the same host.
            num_machines: All of the group, on one host.
            image: What they start from.
            holder: Whose quota it counts against.
            lease_s: How long the room is kept for machines that do not come.
            now: Seconds.
            avoid: A host that did not answer: its placement of the group is given up, and nothing
                new is placed there until it reports again.
            is_grading: It may use the slots that hosts reserve for grading.

        Raises:
            HostsFullError: No host has room for all of it, or the quota is used up.
            ValueError: A group of no machines, or room for no time or for ever.

        """
        if not 0 < lease_s <= LEASE_S_MAX:
            raise ValueError(f"lease_s: expected 0 < x <= {LEASE_S_MAX:g}, got {lease_s}")
        if avoid in self.hosts:
            self.hosts[avoid].is_silent = True
        placement = self._placements.get(group_id)
        if placement is not None and placement.host == avoid:
            self.release(group_id)
            placement = None
        if placement is None:
            self._check(num_machines, holder)
            host, has_image = self.choose_host(image, num_machines, avoid, is_grading)
            placement = Placement(
                host.name, holder, num_machines, lease_s, has_image=has_image, image=image
            )
            self._keep(group_id, placement, host)
            if image:
                self._hold(image, host)
        placement.expires_at = now + max(lease_s, placement.lease_s)
        return placement

    def _check(self, num_machines: int, holder: str) -> None:
        if num_machines < 1:
            raise ValueError(f"num_machines: expected at least 1, got {num_machines}")
        quota = self._quotas.get(holder, self._quota)
        if quota and self._by_holder[holder] + num_machines > quota:
            raise HostsFullError(f"{holder}: {num_machines} more exceed its quota of {quota}")

    def choose_host(
        self, image: str, num_machines: int, avoid: str, is_grading: bool
    ) -> tuple[Host, bool]:
        """Return a host, and whether it was chosen for holding the image.

        Raises:
            HostsFullError: No host has room for all machines.

        """

        def fits(host: Host) -> bool:
            return host.name != avoid and host.has_room(num_machines, is_grading=is_grading)

        share = SOFT_CAP * self._num_placed / max(1, self._num_slots)
        for host in self._draw_two(self._holders.get(image, ())):
            if host.fill <= share and fits(host):
                return host, True
        for host in (*self._draw_two(self.names), *self.hosts.values()):
            if fits(host):
                return host, False
        raise HostsFullError(f"no room for {num_machines} machines on {self.num_hosts} hosts")

    def _draw_two(self, names: Sequence[str]) -> list[Host]:
        """Return two hosts drawn at random, the emptier one first."""
        if not names:
            return []
        pair = [self.hosts[names[self._rng.randrange(len(names))]] for _ in range(2)]
        return sorted(pair, key=lambda host: host.fill)

    def _hold(self, image: str, host: Host) -> None:
        if image not in host.images:
            host.images.add(image)
            self._holders[image].append(host.name)

    def _let_go(self, image: str, host: Host) -> None:
        self._holders[image].remove(host.name)
        if not self._holders[image]:
            del self._holders[image]

    def _keep(self, group_id: str, placement: Placement, host: Host) -> None:
        self._placements[group_id] = placement
        self._by_holder[placement.holder] += placement.num_machines
        self._num_placed += placement.num_machines
        host.num_placed += placement.num_machines
        host.groups.add(group_id)

    def release(self, group_id: str) -> None:
        """Release a group's room; repeating it does nothing."""
        placement = self._placements.pop(group_id, None)
        if placement is None:
            return
        self._num_placed -= placement.num_machines
        self._by_holder[placement.holder] -= placement.num_machines
        if self._by_holder[placement.holder] == 0:
            del self._by_holder[placement.holder]  # Each grading has a holder of its own.
        host = self.hosts[placement.host]
        host.num_placed -= placement.num_machines
        host.groups.discard(group_id)

    def expire(self, now: float) -> int:
        """Forget hosts that fell silent and groups that nobody renewed; return how many of both.

        A group whose host is gone is placed again on its next request.
        """
        silent = [h for h in self.hosts.values() if h.seen_at + HOST_SILENCE_S < now]
        late = {g for g, placement in self._placements.items() if placement.expires_at <= now}
        late.update(*(host.groups for host in silent))
        for group_id in late:
            self.release(group_id)
        for host in silent:
            self._num_slots -= host.num_slots
            self.names.remove(host.name)
            for image in host.images:
                self._let_go(image, host)
            del self.hosts[host.name]
        return len(silent) + len(late)
