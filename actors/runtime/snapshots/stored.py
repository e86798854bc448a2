"""Snapshots in the object store, the newest few of each fold.

```
 snapshots/<fold>/<number>-<digest>     zstd of msgpack: a head, then the state (`state_tree.py`)
```
The number counts folded events, so later snapshots have greater numbers. Stores put atomically and
the key contains the digest of the bytes: a snapshot is complete or absent, and damage is detected.
"""

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import xxhash
import zstandard

from penstock.actors.runtime.snapshots.state_tree import Packer, Unpacker
from penstock.messages.base import Stream
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CodecError, CorruptDataError, FormatError
from penstock.messages.reading.parsing import parse_msgpack

log = logging.getLogger(__name__)

SNAPSHOT_PREFIX = "snapshots/"
SNAPSHOT_FORMAT = 1
"""Format version of snapshots. A reader takes none of another one: the log has everything."""
NUM_KEPT = 3
"""Snapshots of a fold that are kept: a damaged one falls back to the one before."""
BYTES_MAX = 8 << 30
"""Maximum unpacked size of a snapshot."""


class SnapshotHead(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a snapshot."""

    format: int
    fold: str
    """Name of the actor."""
    version: int
    """Version of the fold's rules (`Actor.snapshot_version`)."""
    positions: dict[Stream, int]
    """Last sequence of each stream that the state reflects."""
    num_events: int
    mark: int = 0
    """Position that the state must not be ahead of (`Actor.mark`)."""
    settings: str = ""
    """Digest of the settings that the state depends on."""
    classes: list[str] = []


class _Format(msgspec.Struct):
    format: int = 0


_LENGTH_BYTES = 4
_state_decoder: msgspec.msgpack.Decoder[dict[str, Any]] = msgspec.msgpack.Decoder(dict[str, Any])


def pack_state(roots: dict[str, Any], head: SnapshotHead) -> bytes:
    """Return the bytes of a snapshot.

    Args:
        roots: The state by name.
        head: Its metadata, without settings and classes, which come from the state.

    """
    packer = Packer()
    state = {name: packer.pack(value) for name, value in roots.items()}
    head = msgspec.structs.replace(head, settings=packer.settings, classes=packer.classes)
    start = msgspec.msgpack.encode(head)
    # Level 1: at higher levels compression takes longer than everything else.
    compressor = zstandard.ZstdCompressor(1, write_checksum=True)
    body = compressor.compress(msgspec.msgpack.encode(state))
    return len(start).to_bytes(_LENGTH_BYTES, "little") + start + body


def read_head(data: bytes, what: str) -> tuple[SnapshotHead, memoryview]:
    """Return the head of a snapshot, and its packed state.

    Raises:
        FormatError: Of another format.
        CodecError: Not a snapshot.

    """
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    start = memoryview(data)[_LENGTH_BYTES:end]
    found = parse_msgpack(start, _Format, what).format
    if found != SNAPSHOT_FORMAT:
        raise FormatError(f"{what}: expected format {SNAPSHOT_FORMAT}, got {found}")
    return parse_msgpack(start, SnapshotHead, what), memoryview(data)[end:]


def unpack_state(
    data: bytes, roots: dict[str, Any], *, fold: str, version: int, what: str
) -> tuple[SnapshotHead, dict[str, Any]]:
    """Fill newly built state from a snapshot's bytes; return its head and the filled state.

    Raises:
        FormatError: The format, the rules or the settings differ; the state is unchanged.
        CodecError: Not a valid snapshot; the state is unchanged.

    """
    head, body = read_head(data, what)
    if (head.fold, head.version) != (fold, version):
        found = f"got {head.fold} version {head.version}"
        raise FormatError(f"{what}: expected {fold} version {version}, {found}")
    packer = Packer()
    fresh = {name: packer.pack(value) for name, value in roots.items()}
    if packer.settings != head.settings:
        raise FormatError(f"{what}: made with other settings of this role")
    try:
        plain = zstandard.ZstdDecompressor().decompress(body, max_output_size=BYTES_MAX)
        trees = _state_decoder.decode(plain)
        if set(trees) != set(roots):
            raise CodecError(f"expected {sorted(roots)}, got {sorted(trees)}")
        unpacker = Unpacker(head.classes)
        return head, {name: unpacker.fill(trees[name], roots[name]) for name in roots}
    except (ValueError, LookupError, TypeError, AttributeError, zstandard.ZstdError) as error:
        # Reset a partly filled state, for the previous snapshot or for the whole log.
        undo = Unpacker(packer.classes)
        for name, value in roots.items():
            undo.fill(fresh[name], value)
        raise CodecError(f"{what}: not a state of {fold}: {error}") from error


async def store_snapshot(store: ObjectStore, fold: str, data: bytes, num_events: int) -> None:
    """Store a snapshot, then delete all but the newest few of the fold."""
    key = f"{_prefix(fold)}{num_events:012d}-{xxhash.xxh3_128_hexdigest(data)}"
    await store.put(key, data)
    for old in (await store.keys(_prefix(fold)))[:-NUM_KEPT]:
        await store.delete(old)


async def stored_snapshots(store: ObjectStore, fold: str) -> Sequence[str]:
    """Return the keys of a fold's snapshots, the newest first."""
    return list(reversed(await store.keys(_prefix(fold))))


async def read_snapshot(store: ObjectStore, key: str) -> bytes:
    """Return a snapshot's bytes.

    Raises:
        CorruptDataError: They do not match the digest in the key.
        NotFoundError: It no longer exists.

    """
    data = await store.get(key)
    if xxhash.xxh3_128_hexdigest(data) != key.rpartition("-")[2]:
        raise CorruptDataError(f"{key}: the bytes do not match the digest in the name")
    return data


async def oldest_positions(store: ObjectStore) -> dict[str, dict[Stream, int]]:
    """Return, by fold, the positions of the oldest kept snapshot; restarts need the log after them.

    A damaged snapshot counts as position 0.
    """
    found: dict[str, dict[Stream, int]] = {}
    for key in await store.keys(SNAPSHOT_PREFIX):
        fold = key.removeprefix(SNAPSHOT_PREFIX).rpartition("/")[0]
        if fold in found:
            continue
        try:
            data = await read_snapshot(store, key)
            found[fold] = read_head(data, key)[0].positions
        except (ValueError, LookupError) as error:
            log.warning("snapshot %s is unusable: %s", key, error)
            found[fold] = {}
    return found


def _prefix(fold: str) -> str:
    return f"{SNAPSHOT_PREFIX}{fold}/"
