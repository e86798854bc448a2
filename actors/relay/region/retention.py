"""Decides which updates a store makes and which it deletes, from the manifests it holds. Pure.

```
 0 ─ 1 ─ ... ─ 8 ─ ... ─ 56 ─ ... ─ 64 ─ ... ─ 72 ─ 73         deltas, from the publisher
 └── merged ───┴── ... ──┴─ merged ─┴─ merged ─┘               every 8
 └───────────── merged ─────────────┘                          every 32, every 64
 full                               full                       every 64, from full + deltas
```
Deltas merged over 8, 32 and 64 versions take about 0.47, 0.26 and 0.18 of the bytes of the single
deltas. With the middle span, catching up over 64 versions takes at most 0.43 of these bytes from
any version; without it, 0.53.

The floor is the oldest full snapshot that is kept. Updates from versions before it are deleted; a
replica that is older than the floor starts from that full snapshot.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from penstock.actors.relay.core.catalog import NOTHING
from penstock.messages.weights import SnapshotKind, WeightsPublished

MERGE_SPANS = (8, 32, 64)
"""Numbers of versions over which deltas are merged."""
MERGE_EVERY = MERGE_SPANS[0]
"""Number of versions between two consolidations."""
FULL_EVERY = 64
"""Number of versions between two full snapshots."""
NUM_FULL_KEPT = 2
"""Number of newest full snapshots to keep."""


class UpdateEdge(NamedTuple):
    """An existing or planned update: its version, kind and base."""

    policy_version: int
    kind: SnapshotKind
    base_version: int


def edge_of(manifest: WeightsPublished) -> UpdateEdge:
    """Return the edge of a manifest."""
    return UpdateEdge(manifest.policy_version, manifest.kind, manifest.base_version)


def due(manifests: Iterable[WeightsPublished], newest: int) -> list[UpdateEdge]:
    """Return the merged deltas and full snapshots that a store lacks, in order of version.

    Updates that would be deleted at once are left out: after a jump over many versions, none is
    made for the older ones, nor from bases before the oldest full snapshot.
    """
    have = set(map(edge_of, manifests))
    full_versions = (edge.policy_version for edge in have if edge.kind is SnapshotKind.FULL)
    oldest = min(full_versions, default=0)
    # Start at the full snapshot that will be the oldest one kept.
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

    Args:
        manifests: Manifests in the store.
        needed: Versions that must stay reachable: those under lease, those that unconsumed
            trajectories refer to, and those that a publisher may start from.

    """
    full_versions = sorted(m.policy_version for m in manifests if m.kind is SnapshotKind.FULL)
    if not full_versions:
        return NOTHING
    # Not the newest, so that a replica between the two need not start over.
    bound = min([full_versions[-NUM_FULL_KEPT:][0], *needed])
    return max((version for version in full_versions if version <= bound), default=full_versions[0])


def is_kept(edge: UpdateEdge, oldest: int) -> bool:
    """Return whether an update is a full snapshot at the floor or newer, or starts from there."""
    if edge.kind is SnapshotKind.FULL:
        return edge.policy_version >= oldest
    return edge.base_version >= oldest
