"""Weights on their way: what each version cost each region."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from penstock.actors.monitor.curves import append_thinned
from penstock.actors.monitor.state import DeltaPoint, RegionView
from penstock.messages.base import Event
from penstock.messages.weights import (
    SnapshotKind,
    WeightsApplied,
    WeightsPublished,
    WeightsRelayed,
)

NUM_VERSIONS_KNOWN_MAX = 1024


class Regions:
    """Folds manifests and acknowledgements."""

    def __init__(self, regions: dict[str, RegionView]) -> None:
        self._regions = regions
        self._published: OrderedDict[int, WeightsPublished] = OrderedDict()
        self.handlers: dict[type[Event], Callable[[Any, float], None]] = {
            WeightsPublished: self._on_published,
            WeightsRelayed: self._on_relayed,
            WeightsApplied: self._on_applied,
        }

    def _on_published(self, event: WeightsPublished, at: float) -> None:
        self._published[event.policy_version] = event
        if len(self._published) > NUM_VERSIONS_KNOWN_MAX:
            self._published.popitem(last=False)

    def _on_relayed(self, event: WeightsRelayed, at: float) -> None:
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

    def _region(self, name: str) -> RegionView:
        return self._regions.setdefault(name, RegionView())

    def _point(self, name: str, policy_version: int) -> DeltaPoint:
        """Return the region's point of a version, made from its manifest if it is new."""
        region = self._region(name)
        for point in reversed(region.deltas):
            if point.policy_version == policy_version:
                return point
        point = DeltaPoint(policy_version=policy_version)
        if manifest := self._published.get(policy_version):
            point.kind = manifest.kind
            point.full_bytes = manifest.full_bytes
            point.changed_fraction = manifest.num_changed / max(1, manifest.num_params)
            is_full = manifest.kind is SnapshotKind.ANCHOR and policy_version > 0
            region.num_full_after_v0 += int(is_full)
        append_thinned(region.deltas, point)
        return point
