"""Lists the versions that a store holds, and finds the shortest update path between two versions.

Every manifest is an edge from its base to its version; a full snapshot is an edge from `NOTHING`.
Its cost is the time to fetch its bytes and to apply them. Deltas, merged deltas and full snapshots
thus need no separate treatment, and catching up is a shortest-path problem.
"""

import heapq
import logging
from collections import defaultdict
from collections.abc import Iterable
from itertools import count

import msgspec

from penstock.actors.relay.core.objects import PREFIX, is_manifest, manifest_key
from penstock.actors.relay.core.store_io import gather_bounded, read_manifest
from penstock.actors.relay.core.version_head import read_head
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CorruptDataError, NotFoundError
from penstock.messages.weights import SnapshotKind, WeightsPublished

log = logging.getLogger(__name__)

NOTHING = -1
"""Version number of a replica without weights, and base of full snapshots."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Speeds of fetching and applying updates, which give edges their cost."""

    fetch_bytes_s: float = 25e6
    """Bytes fetched per second; the default fits a store that a few dozen replicas share on a
    gigabit link, or a link between continents."""
    apply_bytes_s: float = 1e9
    """Bytes of the whole snapshot per second; applying any update decodes against the base and
    digests the result."""

    def cost_s(self, manifest: WeightsPublished) -> float:
        """Return the seconds that fetching and applying an update takes."""
        return num_bytes(manifest) / self.fetch_bytes_s + manifest.full_bytes / self.apply_bytes_s


Node = tuple[int, str]
"""A version and its root digest, which identify weights regardless of their publisher."""
_QueueEntry = tuple[float, int, int, WeightsPublished | None]
"""Cost, order of discovery, version reached, last edge."""


class Catalog:
    """The manifests of one store."""

    def __init__(self, store: ObjectStore, rates: Rates = Rates()) -> None:  # noqa: B008
        self._store = store
        self._rates = rates
        self._manifests: dict[str, WeightsPublished] = {}

    @property
    def manifests(self) -> list[WeightsPublished]:
        """Manifests known since the last `refresh`, sorted by key."""
        return [self._manifests[key] for key in sorted(self._manifests)]

    async def refresh(self) -> None:
        """List the store's manifests again; an unreadable manifest counts as absent."""
        keys = [key for key in await self._store.keys(PREFIX) if is_manifest(key)]
        # Manifests are immutable, so each is read only once.
        self._manifests = {key: self._manifests[key] for key in keys if key in self._manifests}
        new = [key for key in keys if key not in self._manifests]
        for key, manifest in zip(new, await gather_bounded(map(self._read, new)), strict=True):
            if manifest is not None:
                self._manifests[key] = manifest

    @classmethod
    async def of_origin(cls, store: ObjectStore) -> "Catalog":
        """Return a catalog of the committed versions of a store that has a head.

        Raises:
            CorruptDataError: The head is damaged.

        """
        head = await read_head(store)
        catalog = cls(store)
        await catalog.refresh()
        catalog.keep_history([head.node])
        return catalog

    def keep_history(self, heads: Iterable[Node]) -> None:
        """Drop manifests that do not lead to one of these versions."""
        # Publishers that were fenced off leave manifests behind that were never committed.
        nodes = _history(self._manifests.values(), heads)
        self._manifests = {k: m for k, m in self._manifests.items() if _target(m) in nodes}

    async def _read(self, key: str) -> WeightsPublished | None:
        try:
            return await read_manifest(self._store, key)
        except (CorruptDataError, NotFoundError) as error:
            # A manifest may be deleted between the listing and this read.
            log.debug("ignoring manifest %s: %s", key, error)
            return None

    def add(self, manifest: WeightsPublished) -> None:
        """Add a manifest that was just stored."""
        self._manifests[manifest_key(manifest)] = manifest

    def discard(self, manifest: WeightsPublished) -> None:
        """Remove a manifest that was deleted or found damaged."""
        self._manifests.pop(manifest_key(manifest), None)

    def find(self, version: int, kind: SnapshotKind) -> WeightsPublished | None:
        """Return the first manifest of a version and kind, or None."""
        key = (version, kind)
        return next((m for m in self.manifests if (m.policy_version, m.kind) == key), None)

    def plan(self, version: int, target: int | None = None) -> list[WeightsPublished]:
        """Return the shortest update path to `target`, or to the newest version within reach.

        The path is empty if there is none, or if the version is already there.
        """
        return shortest_update_path(self.manifests, version, target, self._rates)


def num_bytes(manifest: WeightsPublished) -> int:
    """Return the total size of a version's objects in bytes."""
    return sum(shard.num_bytes for shard in manifest.shards)


def shortest_update_path(
    manifests: Iterable[WeightsPublished], version: int, target: int | None, rates: Rates
) -> list[WeightsPublished]:
    """Return the updates to fetch and apply, in order, to get from one version to another.

    Args:
        manifests: Available updates.
        version: Version held; NOTHING for none.
        target: Version to reach; None for the newest within reach.
        rates: Speeds that determine the cost of updates.

    """
    paths = _shortest_paths(manifests, version, rates)
    goal = max(paths, default=NOTHING) if target is None else target
    return paths.get(goal, []) if goal > version else []


def _shortest_paths(
    manifests: Iterable[WeightsPublished], version: int, rates: Rates
) -> dict[int, list[WeightsPublished]]:
    """Return the shortest update path to every version within reach (Dijkstra)."""
    edges: dict[int, list[WeightsPublished]] = {}
    for manifest in manifests:
        edges.setdefault(manifest.base_version, []).append(manifest)
    # The order of discovery breaks ties, as manifests cannot be compared.
    order = count()
    # Starting over from a full snapshot is always possible, so NOTHING is a second start.
    queue: list[_QueueEntry] = [(0.0, next(order), place, None) for place in (version, NOTHING)]
    paths: dict[int, list[WeightsPublished]] = {}
    while queue:
        cost, _, place, last = heapq.heappop(queue)
        # A version is reached on several paths; the first to leave the queue is the shortest.
        if place in paths:
            continue
        paths[place] = [] if last is None else [*paths[last.base_version], last]
        for manifest in edges.get(place, []):
            further = cost + rates.cost_s(manifest)
            heapq.heappush(queue, (further, next(order), manifest.policy_version, manifest))
    return paths


def _target(manifest: WeightsPublished) -> Node:
    return manifest.policy_version, manifest.target_root_digest


def _history(manifests: Iterable[WeightsPublished], heads: Iterable[Node]) -> set[Node]:
    """Return the heads and all versions from which a chain of manifests leads to them."""
    bases: defaultdict[Node, list[Node]] = defaultdict(list)
    for manifest in manifests:
        bases[_target(manifest)].append((manifest.base_version, manifest.base_root_digest))
    nodes: set[Node] = set()
    waiting = [*heads]
    while waiting:
        node = waiting.pop()
        if node not in nodes:
            nodes.add(node)
            waiting += bases[node]
    return nodes
