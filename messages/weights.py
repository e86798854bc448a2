"""Weight snapshots and deltas: manifests and acknowledgements; their bytes lie in object stores."""

from enum import StrEnum
from typing import ClassVar

import msgspec

from penstock.messages.base import Event, Message, Stream


class SnapshotKind(StrEnum):
    """What an update is applied to."""

    FULL = "full"
    """Nothing: it is a full snapshot."""
    DELTA = "delta"
    """The version before."""
    MERGED = "merged"
    """An older version: several deltas merged into one."""


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """A run of elements, in the flat coordinates of the whole snapshot."""

    start: int
    num_elements: int


class ShardRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One object of a snapshot."""

    shard_id: int
    object_key: str
    num_bytes: int
    blake3: str
    codec: str
    codec_version: int = 1
    extents: list[Extent] = []
    """Runs of its elements in order, all of one dtype; any cut of a snapshot is valid."""


class WeightsPublished(Event, frozen=True, kw_only=True):
    """Publisher -> relays. The manifest of one update; immutable."""

    stream: ClassVar[Stream] = Stream.WEIGHTS
    policy_version: int
    base_version: int
    """-1 for a full snapshot."""
    kind: SnapshotKind
    optimizer_step: int
    fencing_token: int
    """Token of the publisher; a lower one than the head's is refused."""
    representation: str
    """Element types, the most frequent first, e.g. `bf16`, `fp8_e4m3+bf16`, `mxfp8+bf16`."""
    base_root_digest: str
    target_root_digest: str
    num_params: int
    num_changed: int
    full_bytes: int
    """Size of the whole snapshot, for the ratio."""
    shards: list[ShardRef]
    config_json: str = ""
    """The policy's config.json, on the full snapshot of version 0."""
    tensor_table_digest: str = ""
    """Digest of names, dtypes and shapes, which define flat coordinates."""
    base_element_digest: str = ""
    target_element_digest: str = ""
    """Sum over all elements of a mix of position and value: parts of a snapshot, however it is cut,
    are digested where they are held, and added up."""
    digests: ShardRef | None = None
    """The digests of tensors and tiles, which locate damage."""
    probe: list[float] = []
    """What the trainer computes with these weights for the probe's prompts
    (`actors/policy/probe.py`), in nats; empty: nothing to compare with."""

    def key(self) -> str:
        """One per version: two publishers cannot both publish it."""
        return str(self.policy_version)

    def object_keys(self) -> list[str]:
        """List the snapshot's shards and digests."""
        digests = [self.digests] if self.digests else []
        return [shard.object_key for shard in (*self.shards, *digests)]


class WeightsRelayed(Event, frozen=True, kw_only=True):
    """Relay -> receivers of its region, monitor."""

    stream: ClassVar[Stream] = Stream.WEIGHTS
    region: str
    policy_version: int
    num_bytes: int
    fetch_ms: float

    def key(self) -> str:
        """One per region and version."""
        return f"{self.region}.{self.policy_version}"


class WeightsApplied(Event, frozen=True, kw_only=True):
    """Receiver -> pacer, monitor: this replica now samples under the version."""

    stream: ClassVar[Stream] = Stream.WEIGHTS
    region: str
    replica: str
    policy_version: int
    root_digest: str
    digest_matches: bool
    from_version: int
    num_bytes: int
    stage_ms: float
    """Fetch, decode and verify, while generation continues."""
    pause_ms: float
    """Pause of generation."""
    applied_at: float = 0.0
    """Unix seconds."""
    probe: list[float] = []
    """What the engine computes for the probe's prompts, in nats."""
    probe_matches: bool = True
    """Whether that is what the trainer computes; if not, the replica serves nothing until it has
    loaded the weights whole."""

    def key(self) -> str:
        """One per replica, version and time: a replica may go back to a version."""
        return f"{self.region}.{self.replica}.{self.policy_version}.{round(self.applied_at * 1e3)}"


class TileRef(msgspec.Struct, frozen=True, array_like=True):
    """One tile of a tensor: 65,536 elements in flat order, the last one maybe fewer."""

    tensor: str
    tile: int


class ReadTiles(Message, frozen=True, kw_only=True):
    """Receiver -> the relay of its region: the tiles that its own copy should hold."""

    policy_version: int
    tiles: list[TileRef]


class TileRead(Message, frozen=True, kw_only=True):
    """Relay -> receiver, one reply per tile."""

    tile: TileRef
    data: bytes
    """The elements, little-endian."""


class UploadWeights(Message, frozen=True, kw_only=True):
    """Trainer -> one publishing rank: upload your part of the snapshot, then verify.

    Answered by `Ack` every second, until it is done.
    """

    policy_version: int
    fencing_token: int
    attempt: str
    """Unique id of the attempt; a rank does the work of an attempt once."""
    tensor_table: bytes
    """Names, dtypes and shapes of the whole snapshot."""
