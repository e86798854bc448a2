"""Versions as objects of a store: keys, manifests, and the encoding of tensors as bytes.

```
 weights/00000007/delta/manifest-<blake3>           WeightsPublished as on the bus; written last
 weights/00000007/delta/0-<blake3>                  one payload per shard
 weights/00000007/delta/digests-<blake3>            digests of all tensors and tiles
 weights/00000064/full/{manifest-<blake3>, table-<blake3>, 0-<blake3> ...}     the table is shard 0
 weights/00000064/merged-00000056/{manifest-<blake3>, 0-<blake3> ...}
```
Every key contains a hash of the object's bytes, so that two publishers cannot overwrite each
other's objects.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from blake3 import blake3

from penstock.actors.relay.core.digests import SUM_MODULUS, DigestTable
from penstock.actors.relay.core.flat_snapshot import (
    FlatSnapshot,
    Table,
    flat_coordinates,
    table_digest,
)
from penstock.kernels import delta
from penstock.kernels.digest import element_sum, run_element_sum
from penstock.kernels.element_types import ELEMENT_TYPES, TensorSpec
from penstock.messages import codec
from penstock.messages.errors import CorruptDataError
from penstock.messages.reading.parsing import parse_msgpack
from penstock.messages.weights import Extent, ShardRef, SnapshotKind, WeightsPublished

PREFIX = "weights/"
MANIFEST = "manifest-"
TABLE_CODEC = "table"
DIGESTS_CODEC = "digests"
_NUM_KEY_DIGITS = 16
"""Number of hexadecimal digits of the hash in a key."""
_BLOCK_SCALED = {"fp8_e4m3", "e8m0"}
"""Types of the elements and of the block scales that together form MXFP8."""
Payloads = list[bytes]
"""Contents of a version's objects, in the order of the manifest's shards."""


def folder_key(version: int, kind: SnapshotKind, base_version: int) -> str:
    """Return the key prefix of one update."""
    name = f"{kind}-{base_version:08d}" if kind is SnapshotKind.MERGED else str(kind)
    return f"{PREFIX}{version:08d}/{name}/"


def manifest_key(manifest: WeightsPublished) -> str:
    """Return the key of a manifest."""
    return manifest_key_of(manifest, codec.encode(manifest))


def manifest_key_of(manifest: WeightsPublished, data: bytes) -> str:
    """Return the key of a manifest, given its encoding."""
    folder = folder_key(manifest.policy_version, manifest.kind, manifest.base_version)
    return f"{folder}{MANIFEST}{blake3(data).hexdigest()[:_NUM_KEY_DIGITS]}"


def is_manifest(key: str) -> bool:
    """Return whether a key is that of a manifest."""
    return key.rpartition("/")[2].startswith(MANIFEST)


class ManifestHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a manifest that are known before any object is encoded."""

    policy_version: int
    base_version: int
    kind: SnapshotKind
    optimizer_step: int
    fencing_token: int
    config_json: str = ""
    base_root_digest: str = ""
    base_element_digest: str = ""
    probe: list[float] = []

    @property
    def folder(self) -> str:
        """Key prefix of the version's objects."""
        return folder_key(self.policy_version, self.kind, self.base_version)


class EncodedObject(msgspec.Struct, frozen=True, kw_only=True):
    """An object that is ready to be stored."""

    ref: ShardRef
    data: bytes
    num_changed: int = 0
    change: int = 0
    """Change of the element digest; the digest changes by the sum over all shards."""


class ShardInput(NamedTuple):
    """The elements of one shard before encoding."""

    number: int
    extents: Sequence[Extent]
    """Extents of the elements in flat coordinates, concatenated."""
    old: np.ndarray | None
    """[N] elements of the base; None for a full snapshot."""
    new: np.ndarray
    """[N] elements of the new version."""
    dtype: str
    """Name of the element type in the tensor table."""


def encode_shard(header: ManifestHeader, shard: ShardInput) -> EncodedObject:
    """Encode one shard; no other part of the snapshot is needed."""
    number, extents, old, new, dtype = shard
    coded_as = ELEMENT_TYPES[dtype].dtype
    if old is None:
        payload = delta.encode_with(delta.Codec.RAW, np.zeros_like(new), new, coded_as)
        num_changed = new.size
        runs = np.split(new, np.cumsum([extent.num_elements for extent in extents])[:-1])
        change = sum(map(run_element_sum, (extent.start for extent in extents), runs))
    else:
        payload = delta.encode(old, new, coded_as)
        changed = np.flatnonzero(old != new)
        places, num_changed = flat_coordinates(extents, changed), changed.size
        change = element_sum(places, new[changed]) - element_sum(places, old[changed])
    codec_name = delta.read_header(payload).codec.name.lower()
    ref = _shard_ref(header.folder, str(number), number, payload, codec_name, extents)
    return EncodedObject(
        ref=ref, data=payload, num_changed=num_changed, change=change % SUM_MODULUS
    )


def encode_tables(
    header: ManifestHeader, table: Table, digests: DigestTable, number: int
) -> tuple[EncodedObject, EncodedObject]:
    """Encode the tensor table (shard 0, for full snapshots) and the digests (shard `number`)."""
    rows, data = msgspec.msgpack.encode(table), msgspec.msgpack.encode(digests)
    table_ref = _shard_ref(header.folder, TABLE_CODEC, 0, rows, TABLE_CODEC, ())
    digests_ref = _shard_ref(header.folder, DIGESTS_CODEC, number, data, DIGESTS_CODEC, ())
    return (
        EncodedObject(ref=table_ref, data=rows),
        EncodedObject(ref=digests_ref, data=data),
    )


def representation(num_elements: Counter[str]) -> str:
    """Return the names of a snapshot's element types, the most frequent first.

    Example: `bf16`, `mxfp8+bf16`, `fp8_e4m3+fp32`.
    """
    counts: Counter[str] = Counter()
    for name, count in num_elements.items():
        counts["e8m0" if name == "F8_E8M0" else ELEMENT_TYPES[name].dtype.name.lower()] += count
    # Block scales are only meaningful together with their elements: MXFP8 is named as one type.
    if counts.keys() >= _BLOCK_SCALED:
        counts["mxfp8"] = sum(counts.pop(name) for name in _BLOCK_SCALED)
    return "+".join(sorted(counts, key=lambda name: (-counts[name], name)))


def _shard_ref(  # noqa: PLR0913, PLR0917 - the fields of one object
    folder: str, name: str, number: int, data: bytes, codec_name: str, extents: Sequence[Extent]
) -> ShardRef:
    check = blake3(data).hexdigest()
    return ShardRef(
        shard_id=number,
        object_key=f"{folder}{name}-{check[:_NUM_KEY_DIGITS]}",
        num_bytes=len(data),
        blake3=check,
        codec=codec_name,
        extents=list(extents),
    )


def begin_full_snapshot(
    manifest: WeightsPublished, payloads: Payloads
) -> tuple[FlatSnapshot, Payloads]:
    """Allocate zeroed tensors from a full snapshot's table; return them with the other payloads.

    Raises:
        CorruptDataError: The first payload is not the tensor table of the manifest.

    """
    if not payloads:
        raise CorruptDataError(f"weights {manifest.policy_version}: no tensor table")
    try:
        return FlatSnapshot(_table(payloads[0], manifest)), payloads[1:]
    except ValueError as error:
        raise CorruptDataError(f"weights {manifest.policy_version}: {error}") from error


def apply_version(
    flat: FlatSnapshot, manifest: WeightsPublished, payloads: Payloads
) -> Callable[[], list[np.ndarray]]:
    """Decode a version against its base, without changing the base.

    Returns:
        A function that writes the version and returns the flat coordinates it wrote.

    Raises:
        CorruptDataError: The objects are damaged, or were encoded against another base.

    """
    if manifest.tensor_table_digest != table_digest(flat.table):
        raise CorruptDataError(
            f"weights {manifest.policy_version}: the tensor table differs from that of the base"
        )
    shards = [shard for shard in manifest.shards if shard.codec != TABLE_CODEC]
    if len(payloads) != len(shards):
        raise CorruptDataError(
            f"weights {manifest.policy_version}: expected {len(shards)} objects,"
            f" got {len(payloads)}"
        )
    # All shards are decoded before any is written, so that damage in one of them leaves the base
    # as it was.
    decoded = [
        (shard.extents, delta.decode(flat.part(shard.extents), payload))
        for shard, payload in zip(shards, payloads, strict=True)
    ]
    return lambda: [flat.overwrite(extents, patch) for extents, patch in decoded]


def _table(data: bytes, manifest: WeightsPublished) -> Table:
    """Decode a tensor table and check its size against the manifest."""
    try:
        table = parse_msgpack(data, tuple[TensorSpec, ...], "table")
        num_bytes = sum(spec.num_bytes for spec in table)
    except (ValueError, TypeError) as error:
        raise CorruptDataError(f"weights: not a tensor table: {error}") from error
    # Checked before allocation: a damaged table could ask for any amount of memory.
    if num_bytes != manifest.full_bytes:
        raise CorruptDataError(
            f"weights: expected a tensor table of {manifest.full_bytes} bytes, got {num_bytes}"
        )
    return table
