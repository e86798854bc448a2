"""What a store makes and what it deletes: pure functions of the manifests it holds.

```
 0 ─ 1 ─ ... ─ 8 ─ ... ─ 56 ─ ... ─ 64 ─ ... ─ 72 ─ 73         deltas, from the publisher
 └──── fold ───┴── ... ──┴── fold ──┴── fold ──┘               every 8
 └────────────── fold ──────────────┘                          every 32, every 64
 anchor                             anchor                     every 64, out of anchor + deltas
```
Of the chain's bytes, folds over 8, 32 and 64 steps take about 0.47, 0.26 and 0.18. With the middle
span a catch-up over 64 versions that begins anywhere takes 0.43 at most; without it, 0.53.

What leads to nothing newer than the floor goes: a replica from before it takes the anchor there.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from penstock.actors.sync_relay.core.catalog import NOTHING
from penstock.messages.weights import SnapshotKind, WeightsPublished

FOLD_SPANS = (8, 32, 64)
FOLD_EVERY = FOLD_SPANS[0]
ANCHOR_EVERY = 64
NUM_ANCHORS_KEPT = 2


class Piece(NamedTuple):
    """A fold or an anchor, made or to be made."""

    policy_version: int
    kind: SnapshotKind
    base_version: int


def piece_of(manifest: WeightsPublished) -> Piece:
    """Return what a manifest is."""
    return Piece(manifest.policy_version, manifest.kind, manifest.base_version)


def due(manifests: Iterable[WeightsPublished], newest: int) -> list[Piece]:
    """Return the folds and anchors that a store should hold and lacks, rising by version.

    Only what will be kept: after a jump over many versions, nothing is made for the older ones, nor
    out of what is before the oldest anchor.
    """
    have = set(map(piece_of, manifests))
    anchors = (piece.policy_version for piece in have if piece.kind is SnapshotKind.ANCHOR)
    oldest = min(anchors, default=0)
    first = max(0, newest // ANCHOR_EVERY - NUM_ANCHORS_KEPT + 1) * ANCHOR_EVERY
    wanted: list[Piece] = []
    for version in range(first + FOLD_EVERY, newest + 1, FOLD_EVERY):
        spans = (span for span in FOLD_SPANS if version % span == 0)
        wanted += [Piece(version, SnapshotKind.FOLD, version - span) for span in spans]
        if version % ANCHOR_EVERY == 0:
            wanted.append(Piece(version, SnapshotKind.ANCHOR, NOTHING))
    return [piece for piece in wanted if piece not in have and is_kept(piece, oldest)]


def floor(manifests: Iterable[WeightsPublished], needed: Collection[int]) -> int:
    """Return the version of the oldest anchor to keep.

    The second newest, or an older one where a needed version is older than that: what somebody
    leases, what trajectories name that are still to be trained, what a publisher may start from.
    NOTHING where there is no anchor.
    """
    anchors = sorted(m.policy_version for m in manifests if m.kind is SnapshotKind.ANCHOR)
    if not anchors:
        return NOTHING
    bound = min([anchors[-NUM_ANCHORS_KEPT:][0], *needed])
    return max((version for version in anchors if version <= bound), default=anchors[0])


def is_kept(piece: Piece, oldest: int) -> bool:
    """Return whether something is the anchor at the floor, or leads on from there."""
    if piece.kind is SnapshotKind.ANCHOR:
        return piece.policy_version >= oldest
    return piece.base_version >= oldest
