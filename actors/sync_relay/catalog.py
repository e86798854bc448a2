"""Which versions a store holds, and the cheapest way from one to another.

Every manifest is an edge from its base to its version, an anchor one from nothing; its cost is its
bytes. Chain, folds and anchors are then the same thing, and catching up is a shortest path.
"""

import heapq
from collections.abc import Iterable
from itertools import count

from penstock.actors.sync_relay.objects import PREFIX, manifest_key
from penstock.actors.sync_relay.transfer import read_manifest
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CorruptDataError, NotFoundError
from penstock.messages.weights import SnapshotKind, WeightsPublished

NOTHING = -1
"""The version of one who holds no weights: the base of anchors."""


_Step = tuple[int, int, int, WeightsPublished | None]
"""Cost, order of discovery, the version reached, the last edge."""


class Catalog:
    """The manifests of one store; immutable objects are read once."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._manifests: dict[str, WeightsPublished] = {}

    @property
    def manifests(self) -> list[WeightsPublished]:
        """Return what the last `refresh` found, in the order of keys."""
        return [self._manifests[key] for key in sorted(self._manifests)]

    async def refresh(self) -> None:
        """Look at the store; a manifest that cannot be read counts as absent."""
        keys = [key for key in await self._store.keys(PREFIX) if key.endswith("/manifest")]
        self._manifests = {key: self._manifests[key] for key in keys if key in self._manifests}
        for key in keys:
            if key not in self._manifests:
                try:
                    self._manifests[key] = await read_manifest(self._store, key)
                except (CorruptDataError, NotFoundError):
                    continue

    def add(self, manifest: WeightsPublished) -> None:
        """Note what was just stored."""
        self._manifests[manifest_key(manifest)] = manifest

    def discard(self, manifest: WeightsPublished) -> None:
        """Forget what was deleted or found damaged."""
        self._manifests.pop(manifest_key(manifest), None)

    def find(self, version: int, kind: SnapshotKind) -> WeightsPublished | None:
        """Return the manifest of a version and kind, or None."""
        wanted = (version, kind)
        return next((m for m in self.manifests if (m.policy_version, m.kind) == wanted), None)

    def anchor_versions(self) -> list[int]:
        """Return the versions of the anchors, rising."""
        kinds = ((m.policy_version, m.kind) for m in self.manifests)
        return sorted(version for version, kind in kinds if kind is SnapshotKind.ANCHOR)

    def plan(self, version: int, target: int | None = None) -> list[WeightsPublished]:
        """Return the cheapest way from `version` to `target`, or to the newest within reach.

        Empty where there is none, or nothing newer.
        """
        ways = _shortest_ways(self.manifests, version)
        goal = max(ways, default=NOTHING) if target is None else target
        return ways.get(goal, []) if goal > version else []


def num_bytes(manifest: WeightsPublished) -> int:
    """Return the bytes of a version's objects."""
    return sum(shard.num_bytes for shard in manifest.shards)


def _shortest_ways(
    manifests: Iterable[WeightsPublished], version: int
) -> dict[int, list[WeightsPublished]]:
    """Find the cheapest way to every version within reach (Dijkstra)."""
    edges: dict[int, list[WeightsPublished]] = {}
    for manifest in manifests:
        edges.setdefault(manifest.base_version, []).append(manifest)
    order = count()
    queue: list[_Step] = [(0, next(order), place, None) for place in (version, NOTHING)]
    ways: dict[int, list[WeightsPublished]] = {}
    while queue:
        cost, _, place, last = heapq.heappop(queue)
        if place in ways:
            continue
        ways[place] = [] if last is None else [*ways[last.base_version], last]
        for manifest in edges.get(place, []):
            step = (cost + num_bytes(manifest), next(order), manifest.policy_version, manifest)
            heapq.heappush(queue, step)
    return ways
