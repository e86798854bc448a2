"""Weight snapshots and deltas: manifests and acknowledgements; the bytes go by claim check."""

from enum import StrEnum
from typing import ClassVar

import msgspec

from penstock.messages.base import Event, Message, Stream


class SnapshotKind(StrEnum):
    """What an object set is applied to."""

    FULL = "full"
    """Nothing: a full snapshot."""
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
    """What the object's elements are, one run after the other; all of one dtype. Publishers may
    cut a snapshot as they like."""


class WeightsPublished(Event, frozen=True, kw_only=True):
    """Publisher -> relays. The manifest of one policy version; immutable."""

    stream: ClassVar[Stream] = Stream.WEIGHTS
    policy_version: int
    base_version: int
    """-1 for an anchor."""
    kind: SnapshotKind
    optimizer_step: int
    fencing_token: int
    """Of the publisher; a lower one than the head's is refused."""
    representation: str
    """What its elements are, the most first, e.g. `bf16`, `fp8_e4m3+bf16`, `mxfp8+bf16`."""
    base_root_digest: str
    target_root_digest: str
    num_params: int
    num_changed: int
    full_bytes: int
    """Of the whole snapshot, for the ratio."""
    shards: list[ShardRef]
    config_json: str = ""
    """The policy's config.json, on anchors."""
    tensor_table_digest: str = ""
    """Of names, dtypes and shapes: what flat coordinates mean."""
    base_element_digest: str = ""
    target_element_digest: str = ""
    """Sum over all elements of a mix of place and value: parts of a snapshot may be digested by
    those who hold them, however it is cut, and added up."""
    digests: ShardRef | None = None
    """The digests of tensors and tiles, for who must find out what is damaged."""

    def key(self) -> str:
        """One per version: two publishers cannot both publish it."""
        return str(self.policy_version)


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
    """Fetch, decode and verify, while generation goes on."""
    pause_ms: float
    """Generation stood still."""

    def key(self) -> str:
        """One per replica and version and start of the replica (it may apply a version again)."""
        return f"{self.region}.{self.replica}.{self.policy_version}"


class TileRef(msgspec.Struct, frozen=True, array_like=True):
    """One tile of a tensor: 65,536 elements in flat order, the last one maybe fewer."""

    tensor: str
    tile: int


class ReadTiles(Message, frozen=True, kw_only=True):
    """Receiver -> the relay of its region, whose store is sound: what its own copy should hold."""

    policy_version: int
    tiles: list[TileRef]


class TileRead(Message, frozen=True, kw_only=True):
    """Relay -> receiver, one reply a tile."""

    tile: TileRef
    data: bytes
    """The elements, little-endian."""


class UploadWeights(Message, frozen=True, kw_only=True):
    """Trainer -> one publishing rank: upload your part of what was handed over, then prove it.

    Answered by `Ack` every second, until it is done.
    """

    policy_version: int
    fencing_token: int
    attempt: str
    """Unlike any other; asked again under it, a rank does nothing twice."""
    tensor_table: bytes
    """Names, dtypes and shapes of the whole snapshot."""
