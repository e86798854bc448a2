"""One simulated host: it leases as a real one does; its machines only take time.

Drawn or assumed: how long pages of an image and boots take (`settings.py`), on a link and on cores
that are busy for as long as that.
"""

import heapq
import random

import msgspec
from tests.lab.simulate.sandboxes.settings import BurstScenario

from penstock.messages.requests.scheduler import HeldGroup, ReportHost
from penstock.messages.rollout import SandboxRecord
from penstock.messages.sandbox import AcquireGroup


class Held(msgspec.Struct):
    """A group's machines here."""

    holder: str
    lease_ids: list[str]
    lease_s: float
    ready_at: float
    expires_at: float
    records: list[SandboxRecord]


class SimulatedHost:
    """Leases groups, once for each id; reaps what nobody renews."""

    def __init__(self, name: str, scenario: BurstScenario) -> None:
        self.name = name
        self.images: set[str] = set()
        self.groups: dict[str, Held] = {}
        self.num_live = 0
        self.num_created = 0
        self.num_expired = 0
        self._scenario = scenario
        self._rng = random.Random(f"{scenario.seed}/{name}")
        self._link_free_at = 0.0
        self._cores = [0.0] * scenario.num_cores
        """When each is free, as a heap."""

    def acquire(self, request: AcquireGroup, image: str, now: float) -> Held | None:
        """Return a group's machines, existing or booting; None if there is no room."""
        held = self.groups.get(request.group_id)
        if held is None:
            if self.num_live + len(request.lease_ids) > self._scenario.num_slots:
                return None
            held = self.groups[request.group_id] = self._create(request, image, now)
        held.expires_at = max(now, held.ready_at) + held.lease_s
        return held

    def _create(self, request: AcquireGroup, image: str, now: float) -> Held:
        start_at = self._page_in(image, now)
        ends_at, records = start_at, list[SandboxRecord]()
        for _ in request.lease_ids:
            boot_s = self._scenario.boot_ms / 1e3
            boot_s *= self._rng.lognormvariate(0.0, self._scenario.boot_sigma)
            end_at = max(start_at, self._cores[0]) + boot_s
            heapq.heapreplace(self._cores, end_at)
            ends_at = max(ends_at, end_at)
            records.append(_record(boot_s))
        self.num_created += len(records)
        self.num_live += len(records)
        return Held(request.holder, request.lease_ids, request.lease_s, ends_at, 0.0, records)

    def _page_in(self, image: str, now: float) -> float:
        """Return when an image's pages are here; the link carries one image at a time."""
        if image not in self.images:
            self.images.add(image)
            self._link_free_at = max(now, self._link_free_at) + self._scenario.fetch_s
        return max(now, self._link_free_at)

    def renew(self, group_ids: list[str], now: float) -> list[str]:
        """Renew groups; return those that are not here."""
        for group_id in group_ids:
            if (held := self.groups.get(group_id)) is not None:
                held.expires_at = now + held.lease_s
        return [group_id for group_id in group_ids if group_id not in self.groups]

    def release(self, group_id: str) -> int:
        """End a group's machines; return how many."""
        held = self.groups.pop(group_id, None)
        num_ended = len(held.records) if held else 0
        self.num_live -= num_ended
        return num_ended

    def reap(self, now: float) -> None:
        """End expired groups."""
        expired = [g for g, held in self.groups.items() if held.expires_at <= now]
        self.num_expired += sum(self.release(group_id) for group_id in expired)

    def report(self) -> ReportHost:
        """Return its report to the scheduler."""
        return ReportHost(
            host=self.name,
            num_slots=self._scenario.num_slots,
            num_live=self.num_live,
            image_digests=list(self.images),
            groups=[
                HeldGroup(group_id=g, holder=held.holder, num_machines=len(held.lease_ids))
                for g, held in self.groups.items()
            ],
        )


def _record(boot_s: float) -> SandboxRecord:
    return SandboxRecord(
        backend="simulated",
        isolation_class="hardware_vm",
        kernel_digest="",
        image_digest="",
        boot_ms=round(boot_s * 1e3, 2),
    )
