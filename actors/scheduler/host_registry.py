"""Chooses the host of each group's machines. Pure: no tasks, no clock, no bus.

```
 place(group) ─▶ has a host? ── yes ─▶ the same host, renewed
                   │ no
                   ├─▶ the emptier of two hosts with its image, if below the soft cap
                   ├─▶ the emptier of any two hosts, if it has room; it then gets the image
                   └─▶ any host with room, else `HostsFullError`: the client waits and retries
```
A group is placed as a unit: its machines share one image, which the host pages in once. The soft
cap keeps hosts with popular images from becoming hot spots. Hosts report their groups: room ends
with the machines, and a restarted scheduler adopts reported groups instead of placing them again.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from penstock.messages.errors import QueueFullError
from penstock.messages.requests.scheduler import HeldGroup

SOFT_CAP = 1.08
"""A host with the image is preferred while its fill is at most this multiple of the mean fill."""
HOST_SILENCE_S = 5.0
"""Seconds without a report after which a host is forgotten; hosts report every second."""
LEASE_S_MAX = 86400.0


class Host(msgspec.Struct):
    """A sandbox host by its last report, with the groups placed on it."""

    name: str
    num_slots: int = 0
    reserved_slots: int = 0
    """Slots that only grading may use."""
    num_others: int = 0
    """Machines outside of placed groups, such as a judge's."""
    num_placed: int = 0
    """Machines of the placed groups."""
    seen_at: float = 0.0
    is_silent: bool = False
    """Whether it failed to answer a client since its last report; nothing new is placed then."""
    images: set[str] = msgspec.field(default_factory=set[str])
    groups: set[str] = msgspec.field(default_factory=set[str])
    """Ids of the placed groups."""

    @property
    def load(self) -> int:
        """Machines that the host has or will have."""
        return self.num_others + self.num_placed

    @property
    def fill(self) -> float:
        """Load as a fraction of the slots."""
        return self.load / self.num_slots if self.num_slots else 1.0

    def has_room(self, num_machines: int, *, is_grading: bool) -> bool:
        """Return whether a group fits."""
        # An empty host reserves nothing, or a group of its size could never be placed.
        reserved = 0 if is_grading or not self.load else self.reserved_slots
        return not self.is_silent and self.load + num_machines + reserved <= self.num_slots


class Placement(msgspec.Struct):
    """Room of a group, kept for the time of its lease and then while its host reports it."""

    host: str
    holder: str
    num_machines: int
    lease_s: float
    has_image: bool
    expires_at: float = 0.0
    image: str = ""
    is_held: bool = False
    """Whether its host has reported machines of the group."""


class HostsFullError(QueueFullError):
    """No host has room, or the holder's quota is used up; retry later."""


class HostRegistry:
    """Places groups on hosts.

    Args:
        quota: Maximum machines placed for one holder; 0 for no limit.
        quotas: Quotas of single holders that replace `quota`.

    """

    def __init__(
        self, rng: random.Random, *, quota: int = 0, quotas: Mapping[str, int] | None = None
    ) -> None:
        self._rng = rng
        self._quota = quota
        self._quotas = quotas or {}
        self.hosts: dict[str, Host] = {}
        """Reporting hosts by name."""
        self.names: list[str] = []
        """Keys of `hosts` as a list, for random draws."""
        self._holders: defaultdict[str, list[str]] = defaultdict(list)
        """Names of hosts by image."""
        self._placements: dict[str, Placement] = {}
        self._by_holder: Counter[str] = Counter()
        self._num_slots = 0
        self._num_placed = 0

    @property
    def num_hosts(self) -> int:
        """Number of reporting hosts."""
        return len(self.names)

    @property
    def num_placed(self) -> int:
        """Number of placed machines."""
        return self._num_placed

    def knows(self, group_id: str) -> bool:
        """Return whether a group is placed."""
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
        # By difference, so that the totals never need a pass over all hosts.
        self._num_slots += num_slots - host.num_slots
        host.num_slots, host.reserved_slots, host.seen_at = num_slots, reserved_slots, now
        host.is_silent = False
        self._adopt(host, groups, now)
        self._note_images(host, images)
        held = sum(group.num_machines for group in groups if group.group_id in host.groups)
        host.num_others = max(0, num_live - held)

    def _note_images(self, host: Host, images: Sequence[str]) -> None:
        # Images of placed groups count as held before the host has fetched them: otherwise every
        # group in between would spread the image to another host.
        coming = {self._placements[group_id].image for group_id in host.groups}
        for image in host.images - coming.difference([""]) - set(images):
            host.images.remove(image)
            self._remove_image(image, host)
        for image in images:
            self._add_image(image, host)

    def _adopt(self, host: Host, groups: Sequence[HeldGroup], now: float) -> None:
        for group in groups:
            placement = self._placements.get(group.group_id)
            # The host reports a group of the past, which is not placed here any more.
            if placement is None and group.num_machines == 0:
                continue
            if placement is None:
                count = group.num_machines
                placement = Placement(host.name, group.holder, count, 0.0, has_image=True)
                self._add_placement(group.group_id, placement, host)
            if placement.host == host.name:
                placement.is_held = True
                placement.expires_at = max(placement.expires_at, now + HOST_SILENCE_S)
        # Only groups that had machines end; the others may still be on their way.
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
        """Place a group, or renew its placement.

        Args:
            group_id: Id of the group; a repeated call returns the same host.
            num_machines: Machines of the group, all on one host.
            image: Digest of their image.
            holder: Holder whose quota counts.
            lease_s: Seconds to keep the room until the machines are reported.
            now: Monotonic seconds.
            avoid: Host that did not answer: the group leaves it, and nothing new is placed there
                until it reports again.
            is_grading: Whether the group may use slots reserved for grading.

        Raises:
            HostsFullError: No host has room for the whole group, or the quota is used up.
            ValueError: `num_machines` or `lease_s` is out of range.

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
            self._add_placement(group_id, placement, host)
            if image:
                self._add_image(image, host)
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
        """Return a host, and whether it was chosen because it has the image.

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
        # The emptier of two random choices spreads load nearly as well as the emptiest of all, and
        # costs constant time.
        if not names:
            return []
        pair = [self.hosts[names[self._rng.randrange(len(names))]] for _ in range(2)]
        return sorted(pair, key=lambda host: host.fill)

    def _add_image(self, image: str, host: Host) -> None:
        if image not in host.images:
            host.images.add(image)
            self._holders[image].append(host.name)

    def _remove_image(self, image: str, host: Host) -> None:
        self._holders[image].remove(host.name)
        if not self._holders[image]:
            del self._holders[image]

    def _add_placement(self, group_id: str, placement: Placement, host: Host) -> None:
        self._placements[group_id] = placement
        self._by_holder[placement.holder] += placement.num_machines
        self._num_placed += placement.num_machines
        host.num_placed += placement.num_machines
        host.groups.add(group_id)

    def release(self, group_id: str) -> None:
        """Release a group's room; repeated calls have no effect."""
        placement = self._placements.pop(group_id, None)
        if placement is None:
            return
        self._num_placed -= placement.num_machines
        self._by_holder[placement.holder] -= placement.num_machines
        if self._by_holder[placement.holder] == 0:
            # Each grading is a holder of its own: without this, the counter would grow forever.
            del self._by_holder[placement.holder]
        host = self.hosts[placement.host]
        host.num_placed -= placement.num_machines
        host.groups.discard(group_id)

    def expire(self, now: float) -> int:
        """Forget silent hosts and expired groups; return how many."""
        silent = [h for h in self.hosts.values() if h.seen_at + HOST_SILENCE_S < now]
        late = {g for g, placement in self._placements.items() if placement.expires_at <= now}
        late.update(*(host.groups for host in silent))
        for group_id in late:
            self.release(group_id)
        for host in silent:
            self._num_slots -= host.num_slots
            self.names.remove(host.name)
            for image in host.images:
                self._remove_image(image, host)
            del self.hosts[host.name]
        return len(silent) + len(late)
