"""Folds the transfers of weight versions: their cost per region, and each region's lag.

```
 published v7 ──── lag_s of v7 in west ────▶ applied by west's slowest replica
              head = 9:  west serves 7, lag_versions = 2, lag_s = since v8 was published
```
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from penstock.actors.monitor.curves import NUM_SAMPLES_MAX, append_thinned, median_or_none
from penstock.actors.monitor.state import DeltaPoint, MonitorState, RegionView
from penstock.messages.base import Event
from penstock.messages.generation import ReplicaReported
from penstock.messages.weights import (
    SnapshotKind,
    WeightsApplied,
    WeightsPublished,
    WeightsRelayed,
)

NUM_VERSIONS_KNOWN_MAX = 1024
"""Largest number of versions whose manifest and publication time are kept."""
REPLICA_SILENT_S = 10.0
"""Time without a report, in seconds, after which a replica counts as lost."""


class RegionViews:
    """Fold of published, relayed and applied versions into the views of regions."""

    def __init__(self, state: MonitorState) -> None:
        self._totals = state.published
        self._regions = state.regions
        self._ratios: deque[float] = deque(maxlen=NUM_SAMPLES_MAX)
        self._pauses_ms: deque[float] = deque(maxlen=NUM_SAMPLES_MAX)
        self._published: OrderedDict[int, WeightsPublished] = OrderedDict()
        self._published_at: dict[int, float] = {}
        self._seen_at: dict[str, float] = {}
        """Replica -> time of the last report in Unix seconds; 0 after the replica left."""
        self._queue_s: dict[str, float] = {}
        self.handlers: dict[type[Event], Callable[[Any, float], None]] = {
            WeightsPublished: self._on_published,
            WeightsRelayed: self._on_relayed,
            WeightsApplied: self._on_applied,
            ReplicaReported: self._on_reported,
        }

    def measure_lag(self, now: float) -> None:
        """Update the lag of each region at `now` (Unix seconds).

        A version that is no longer known counts as if published with the oldest known one.
        """
        head = max(self._published, default=0)
        for region in self._regions.values():
            region.lost = self._lost(region, now)
            held = [v for name, v in region.replicas.items() if name not in region.lost]
            # With all replicas lost, the versions that they last served are the best estimate.
            served = min(held or region.replicas.values(), default=-1)
            region.lag_versions = max(0, head - served)
            names = region.replicas.keys() - region.lost
            queues_s = [self._queue_s[name] for name in names if name in self._queue_s]
            region.queue_s = sum(queues_s) / len(queues_s) if queues_s else 0.0
            lacking = [at for version, at in self._published_at.items() if version > served]
            region.lag_s = max(0.0, now - min(lacking, default=now))

    def _lost(self, region: RegionView, now: float) -> list[str]:
        """Return the replicas that have reported before and no longer do."""
        seen = {name: self._seen_at[name] for name in region.replicas if name in self._seen_at}
        return sorted(name for name, at in seen.items() if now - at > REPLICA_SILENT_S)

    def measure_medians(self) -> None:
        """Update the medians over versions and replicas."""
        self._totals.ratio_p50 = median_or_none(self._ratios)
        self._totals.pause_ms_p50 = median_or_none(self._pauses_ms)

    def _on_published(self, event: WeightsPublished, at: float) -> None:
        # A publisher that restarts may publish a version twice.
        if event.policy_version not in self._published:
            self._add_totals(event)
        self._published[event.policy_version] = event
        self._published_at[event.policy_version] = at
        if len(self._published) > NUM_VERSIONS_KNOWN_MAX:
            forgotten, _ = self._published.popitem(last=False)
            del self._published_at[forgotten]

    def _add_totals(self, event: WeightsPublished) -> None:
        self._totals.num_versions += 1
        if event.kind is SnapshotKind.FULL:
            self._totals.num_full_after_v0 += event.policy_version > 0
        elif event.num_changed:
            self._ratios.append(event.full_bytes / sum(s.num_bytes for s in event.shards))
        else:
            self._totals.num_empty_deltas += 1

    def _on_relayed(self, event: WeightsRelayed, at: float) -> None:
        self._region(event.region).num_bytes += event.num_bytes
        point = self._point(event.region, event.policy_version)
        point.num_bytes = event.num_bytes
        point.fetch_ms = event.fetch_ms

    def _on_applied(self, event: WeightsApplied, at: float) -> None:
        region = self._region(event.region)
        region.replicas[event.replica] = event.policy_version
        region.num_digest_mismatches += int(not event.digest_matches)
        point = self._point(event.region, event.policy_version)
        point.num_bytes = point.num_bytes or event.num_bytes
        point.stage_ms = max(point.stage_ms, event.stage_ms)
        point.pause_ms = max(point.pause_ms, event.pause_ms)
        # Version 0 is loaded before anything is served, so its swap pauses nobody.
        if event.policy_version > 0:
            self._pauses_ms.append(event.pause_ms)
            self._totals.pause_ms_max = max(self._totals.pause_ms_max or 0.0, event.pause_ms)
        # A replica that just joined was not behind: it has no earlier version.
        if event.from_version >= 0:
            _note_lag(region, event, at, self._published_at)

    def _on_reported(self, event: ReplicaReported, at: float) -> None:
        """Record that a replica is alive, and its version, which may be older than before."""
        self._seen_at[event.replica] = 0.0 if event.is_leaving else at
        self._queue_s[event.replica] = event.queue_s
        if event.policy_version >= 0:
            self._region(event.region).replicas[event.replica] = event.policy_version

    def _region(self, name: str) -> RegionView:
        return self._regions.setdefault(name, RegionView())

    def _point(self, name: str, policy_version: int) -> DeltaPoint:
        """Return a region's point of a version; create it from the version's manifest."""
        region = self._region(name)
        for point in reversed(region.deltas):
            if point.policy_version == policy_version:
                return point
        point = DeltaPoint(policy_version=policy_version)
        if manifest := self._published.get(policy_version):
            point.kind = manifest.kind
            point.full_bytes = manifest.full_bytes
            point.changed_fraction = manifest.num_changed / max(1, manifest.num_params)
            is_full = manifest.kind is SnapshotKind.FULL and policy_version > 0
            region.num_full_after_v0 += int(is_full)
        append_thinned(region.deltas, point)
        return point


def _note_lag(
    region: RegionView, event: WeightsApplied, at: float, published_at: dict[int, float]
) -> None:
    """Update the lag of the applied version and of the versions that were skipped."""
    for point in reversed(region.deltas):
        if event.from_version < point.policy_version <= event.policy_version:
            lag_s = at - published_at.get(point.policy_version, at)
            point.lag_s = max(point.lag_s, lag_s)
