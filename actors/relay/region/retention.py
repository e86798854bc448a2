"""What a store makes and what it deletes: pure functions of the manifests it holds.

```
 0 ─ 1 ─ ... ─ 8 ─ ... ─ 56 ─ ... ─ 64 ─ ... ─ 72 ─ 73         deltas, from the publisher
 └── merged ───┴── ... ──┴─ merged ─┴─ merged ─┘               every 8
 └───────────── merged ─────────────┘                          every 32, every 64
 full                               full                       every 64, from full + deltas
```
Deltas merged over 8, 32 and 64 versions take about 0.47, 0.26 and 0.18 of the chain's bytes. With
the middle span a catch-up over 64 versions from any version takes 0.43 at most; without it, 0.53.

Whatever leads to nothing newer than the floor is deleted: a replica from before it takes the full
snapshot at the floor.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from penstock.actors.relay.core.catalog import NOTHING
from penstock.messages.weights import SnapshotKind, WeightsPublished

MERGE_SPANS = (8, 32, 64)
MERGE_EVERY = MERGE_SPANS[0]
FULL_EVERY = 64
NUM_FULL_KEPT = 2


class UpdateEdge(NamedTuple):
    """An update, made or planned: the version it leads to, its kind and its base."""

    policy_version: int
    kind: SnapshotKind
    base_version: int


def edge_of(manifest: WeightsPublished) -> UpdateEdge:
    """Return the edge of a manifest."""
    return UpdateEdge(manifest.policy_version, manifest.kind, manifest.base_version)


def due(manifests: Iterable[WeightsPublished], newest: int) -> list[UpdateEdge]:
    """Return the merged deltas and full snapshots that a store lacks, in order of version.

    Only what will be kept: after a jump over many versions, nothing is made for the older ones, nor
    from bases before the oldest full snapshot.
    """
    have = set(map(edge_of, manifests))
    full_versions = (edge.policy_version for edge in have if edge.kind is SnapshotKind.FULL)
    oldest = min(full_versions, default=0)
    first = max(0, newest // FULL_EVERY - NUM_FULL_KEPT + 1) * FULL_EVERY
    planned: list[UpdateEdge] = []
    for version in range(first + MERGE_EVERY, newest + 1, MERGE_EVERY):
        spans = (span for span in MERGE_SPANS if version % span == 0)
        planned += [UpdateEdge(version, SnapshotKind.MERGED, version - span) for span in spans]
        if version % FULL_EVERY == 0:
            planned.append(UpdateEdge(version, SnapshotKind.FULL, NOTHING))
    return [edge for edge in planned if edge not in have and is_kept(edge, oldest)]


def floor(manifests: Iterable[WeightsPublished], needed: Collection[int]) -> int:
    """Return the version of the oldest full snapshot to keep; NOTHING if there is none.

    The second newest, or an older one if a needed version is older than that: a leased one, one
    that unconsumed trajectories name, one that a publisher may start from.
    """
    full_versions = sorted(m.policy_version for m in manifests if m.kind is SnapshotKind.FULL)
    if not full_versions:
        return NOTHING
    bound = min([full_versions[-NUM_FULL_KEPT:][0], *needed])
    return max((version for version in full_versions if version <= bound), default=full_versions[0])


def is_kept(edge: UpdateEdge, oldest: int) -> bool:
    """Check whether an update is the full snapshot at the floor, or leads on from there."""
    if edge.kind is SnapshotKind.FULL:
        return edge.policy_version >= oldest
    return edge.base_version >= oldest
