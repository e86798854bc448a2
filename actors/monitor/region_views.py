"""Weights in each region, as their relays and receivers report them: a section of the page."""

import msgspec


class DeltaPoint(msgspec.Struct, kw_only=True):
    """The transfer of one policy version to one region; times are of the slowest replica."""

    policy_version: int
    kind: str = ""
    num_bytes: int = 0
    full_bytes: int = 0
    changed_fraction: float = 0.0
    fetch_ms: float = 0.0
    stage_ms: float = 0.0
    pause_ms: float = 0.0
    lag_s: float = 0.0
    """From its publication until the replica served it or a newer one."""

    @property
    def ratio(self) -> float:
        """How many times smaller than the full snapshot; 0 if unknown."""
        return self.full_bytes / self.num_bytes if self.num_bytes else 0.0


class RegionView(msgspec.Struct, kw_only=True):
    """Weights in one region."""

    replicas: dict[str, int] = {}
    """Replica -> the version that it serves, or served last."""
    lost: list[str] = []
    """Replicas that left or no longer report; the region's lag does not count them."""
    deltas: list[DeltaPoint] = []
    lag_versions: int = 0
    """Versions between the newest published one and the one that the slowest replica serves."""
    lag_s: float = 0.0
    """Age of the first version that this replica lacks; 0 at the head."""
    queue_s: float = 0.0
    """Mean queue time of its generators."""
    num_bytes: int = 0
    """Fetched by the region's relay, all versions together."""
    num_full_after_v0: int = 0
    num_digest_mismatches: int = 0
