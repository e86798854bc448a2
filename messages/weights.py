"""Manifests and acknowledgements of weight updates; the bytes lie in object stores."""

from enum import StrEnum
from typing import ClassVar

import msgspec

from penstock.messages.base import Event, Message, Stream


class SnapshotKind(StrEnum):
    """Kind of a weight update, by what it is applied to."""

    FULL = "full"
    """Full snapshot, which needs no base."""
    DELTA = "delta"
    """Delta to the previous version."""
    MERGED = "merged"
    """Several deltas merged into one, applied to an older version."""


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """Contiguous range of elements, in flat coordinates of the full snapshot."""

    start: int
    num_elements: int


class ShardRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Reference to one object of a snapshot or delta."""

    shard_id: int
    object_key: str
    num_bytes: int
    blake3: str
    codec: str
    codec_version: int = 1
    extents: list[Extent] = []
    """Ranges of the shard's elements in order, all of one dtype; a snapshot may be cut anywhere."""


class WeightsPublished(Event, frozen=True, kw_only=True):
    """Publisher -> relays: immutable manifest of one weight update."""

    stream: ClassVar[Stream] = Stream.WEIGHTS
    policy_version: int
    base_version: int
    """Version that the update applies to; -1 for a full snapshot."""
    kind: SnapshotKind
    optimizer_step: int
    fencing_token: int
    """Fencing token of the publisher; refused if lower than the head's."""
    representation: str
    """Element types, most frequent first, e.g. `bf16`, `fp8_e4m3+bf16`, `mxfp8+bf16`."""
    base_root_digest: str
    target_root_digest: str
    num_params: int
    num_changed: int
    full_bytes: int
    """Size of the full snapshot in bytes, for the compression ratio."""
    shards: list[ShardRef]
    config_json: str = ""
    """Policy's config.json; set only on the full snapshot of version 0."""
    tensor_table_digest: str = ""
    """Digest of names, dtypes and shapes, which define flat coordinates."""
    base_element_digest: str = ""
    target_element_digest: str = ""
    """Sum over all elements of a hash of position and value, so that digests of parts, computed
    where the parts are held, add up to the snapshot's however it is cut."""
    digests: ShardRef | None = None
    """Object with digests of tensors and tiles, which locate damage."""
    probe: list[float] = []
    """Values in nats that the trainer computes with these weights for the probe's prompts
    (`actors/policy/probe.py`), and with adapters then those of the base alone; empty if there is
    nothing to compare with."""

    def key(self) -> str:
        """Return the key: one event per version, so that two publishers cannot both publish it."""
        return str(self.policy_version)

    def object_keys(self) -> list[str]:
        """List the objects of the update's shards and digests."""
        digests = [self.digests] if self.digests else []
        return [shard.object_key for shard in (*self.shards, *digests)]


class WeightsRelayed(Event, frozen=True, kw_only=True):
    """Relay -> receivers of its region, monitor: a version is in the region's store."""

    stream: ClassVar[Stream] = Stream.WEIGHTS
    region: str
    policy_version: int
    num_bytes: int
    fetch_ms: float

    def key(self) -> str:
        """Return the key: one event per region and version."""
        return f"{self.region}.{self.policy_version}"


class WeightsApplied(Event, frozen=True, kw_only=True):
    """Receiver -> pacer, monitor: this replica now samples with the version."""

    stream: ClassVar[Stream] = Stream.WEIGHTS
    region: str
    replica: str
    policy_version: int
    root_digest: str
    digest_matches: bool
    from_version: int
    num_bytes: int
    stage_ms: float
    """Milliseconds to fetch, decode and verify, during which generation continues."""
    pause_ms: float
    """Milliseconds for which generation paused."""
    applied_at: float = 0.0
    """Time of the swap in Unix seconds."""
    probe: list[float] = []
    """Values in nats that the engine computes for the probe's prompts."""
    probe_matches: bool = True
    """Whether `probe` matches the trainer's values; if not, the replica serves nothing until it has
    loaded a full snapshot."""

    def key(self) -> str:
        """Return the key, with the time because a replica may return to a version."""
        return f"{self.region}.{self.replica}.{self.policy_version}.{round(self.applied_at * 1e3)}"


class TileRef(msgspec.Struct, frozen=True, array_like=True):
    """Tile of a tensor: 65,536 elements in flat order; the last tile may have fewer."""

    tensor: str
    tile: int


class ReadTiles(Message, frozen=True, kw_only=True):
    """Receiver -> relay of its region: send tiles to repair the receiver's copy."""

    policy_version: int
    tiles: list[TileRef]


class TileRead(Message, frozen=True, kw_only=True):
    """Relay -> receiver: one tile; a request gets one reply per tile."""

    tile: TileRef
    data: bytes
    """Elements of the tile, little-endian."""


class UploadWeights(Message, frozen=True, kw_only=True):
    """Trainer -> publishing rank: upload your part of the snapshot, then verify.

    Answered by `Ack` every second until it is done.
    """

    policy_version: int
    fencing_token: int
    attempt: str
    """Unique id of the attempt; a rank does the work of each attempt once."""
    tensor_table: bytes
    """Names, dtypes and shapes of all tensors of the snapshot, encoded."""
