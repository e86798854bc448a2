"""Versions as objects: keys, manifests, and the way from bytes to an image and back.

```
 weights/00000007/delta/manifest                    WeightsPublished, as on the bus; written last
 weights/00000007/delta/0-<blake3>                  one payload a shard
 weights/00000016/anchor/{manifest, 0-<blake3>, 1-<blake3> ...}    0 is the tensor table
 weights/00000016/fold-00000008/{manifest, 0-<blake3> ...}
```
"""

from collections.abc import Mapping

import msgspec
import numpy as np
from blake3 import blake3

from penstock.actors.sync_relay.image import Image, TensorSpec
from penstock.kernels import delta
from penstock.messages.errors import CorruptDataError
from penstock.messages.weights import ShardRef, SnapshotKind, WeightsPublished

PREFIX = "weights/"
REPRESENTATION = "bf16"
TABLE_CODEC = "table"
_NUM_KEY_DIGITS = 16
Payloads = list[bytes]
"""The objects of one version, in the order of the manifest's shards."""


def folder_key(version: int, kind: SnapshotKind, base_version: int) -> str:
    """Return the common start of the keys of one way to one version."""
    name = f"{kind}-{base_version:08d}" if kind is SnapshotKind.FOLD else str(kind)
    return f"{PREFIX}{version:08d}/{name}/"


def manifest_key(manifest: WeightsPublished) -> str:
    """Return where a manifest lies."""
    return folder_key(manifest.policy_version, manifest.kind, manifest.base_version) + "manifest"


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What a manifest says besides its bytes."""

    policy_version: int
    base_version: int
    kind: SnapshotKind
    optimizer_step: int
    fencing_token: int
    config_json: str = ""


def pack_version(
    origin: Origin, base: Image | None, image: Image
) -> tuple[WeightsPublished, Mapping[str, bytes]]:
    """Make the manifest and the objects, by key, of one version.

    Args:
        origin: the version's place in the history.
        base: what the deltas apply to; None for an anchor.
        image: the version itself, of the base's table.

    """
    payloads = [_payload(base, image, number) for number in range(len(image.shards))]
    headers = [delta.read_header(payload) for payload in payloads]
    parts = [
        (header.codec.name.lower(), payload)
        for header, payload in zip(headers, payloads, strict=True)
    ]
    if base is None:
        parts.insert(0, (TABLE_CODEC, msgspec.msgpack.encode(image.table)))
    folder = folder_key(origin.policy_version, origin.kind, origin.base_version)
    shards = [_shard_ref(folder, number, *part) for number, part in enumerate(parts)]
    manifest = WeightsPublished(
        **msgspec.structs.asdict(origin),
        representation=REPRESENTATION,
        base_root_digest="" if base is None else base.digest(),
        target_root_digest=image.digest(),
        num_params=image.num_params,
        num_changed=sum(header.num_changed for header in headers),
        full_bytes=image.num_bytes,
        shards=shards,
    )
    return manifest, {
        shard.object_key: data for shard, (_, data) in zip(shards, parts, strict=True)
    }


def _shard_ref(folder: str, number: int, codec_name: str, data: bytes) -> ShardRef:
    check = blake3(data).hexdigest()
    return ShardRef(
        shard_id=number,
        object_key=f"{folder}{number}-{check[:_NUM_KEY_DIGITS]}",
        num_bytes=len(data),
        blake3=check,
        codec=codec_name,
    )


def unpack_version(base: Image | None, manifest: WeightsPublished, payloads: Payloads) -> Image:
    """Make a version from its base, which is left as it is, and its objects.

    Raises:
        CorruptDataError: objects that are damaged, do not fit the base, or give another digest.

    """
    if manifest.kind is SnapshotKind.ANCHOR:
        image, payloads = Image(_table(payloads[0], manifest)), payloads[1:]
    elif base is None:
        raise CorruptDataError(f"weights {manifest.policy_version}: a delta without its base")
    else:
        image = base.copy()
    if len(payloads) != len(image.shards):
        raise CorruptDataError(
            f"weights {manifest.policy_version}: {len(payloads)} objects"
            f" for {len(image.shards)} shards"
        )
    for shard, payload in zip(image.shards, payloads, strict=True):
        patch = delta.decode(shard, payload)
        shard[patch.flat_indices] = patch.values
    if (digest := image.digest()) != manifest.target_root_digest:
        raise CorruptDataError(
            f"weights {manifest.policy_version}: the digest is {digest},"
            f" the manifest says {manifest.target_root_digest}"
        )
    return image


def _payload(base: Image | None, image: Image, number: int) -> bytes:
    target = image.shards[number]
    if base is None:
        return delta.encode_with(delta.Codec.RAW, np.zeros_like(target), target)
    return delta.encode(base.shards[number], target)


def _table(data: bytes, manifest: WeightsPublished) -> tuple[TensorSpec, ...]:
    """Decode a tensor table; nothing is allocated for one that the manifest does not bear out."""
    try:
        table = msgspec.msgpack.decode(data, type=tuple[TensorSpec, ...])
        num_bytes = sum(spec.size * np.dtype(spec.dtype).itemsize for spec in table)
    except (msgspec.DecodeError, TypeError) as error:
        raise CorruptDataError(f"weights: not a tensor table: {error}") from error
    if num_bytes != manifest.full_bytes or any(min(spec.shape, default=0) < 0 for spec in table):
        raise CorruptDataError("weights: the tensor table does not fit the manifest")
    return table
