"""Logs as one file, for `penstock log export|import`.

A file is one zstd stream of msgpack maps, each with its length as u32 little-endian in front:

- a header `{"penstock_log": FORMAT, "run_id": ...}`, then in log order
- `{"kind": "event", "stream", "sequence", "stored_at", "data"}`, with the event's msgpack as data,
- `{"kind": "object", "key", "data"}`: checkpoints, tasks, tokenizer, weights; objects that an event
  names come right before it,
- on request `{"kind": "content_key", "owner", "key_id", "secret"}`: keys of users, without which
  their turns cannot be read.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import zstandard

from penstock.actors.runtime.files import new_private_file
from penstock.actors.runtime.snapshots.stored import SNAPSHOT_PREFIX
from penstock.actors.runtime.vault import KEYS_PREFIX, REWRAPPED_PREFIX, ContentKey, Vault
from penstock.infra.bus.archive.segments import ARCHIVE_PREFIX
from penstock.messages.base import FORMAT, Claim, Event, Stream, check_format
from penstock.messages.bus import Bus, ObjectStore
from penstock.messages.codec import EVENTS, decode, encode
from penstock.messages.errors import CodecError, ConfigError, CorruptDataError
from penstock.messages.reading.claims import CLAIM_PREFIX, fetch
from penstock.messages.reading.parsing import parse_msgpack, parse_with
from penstock.messages.streams import check_run_id

SLACK_BYTES, ENTRY_RATIO_MAX, TOTAL_RATIO_MAX = 16 << 20, 8, 200
"""An entry may have 16 MiB plus 8 times the file's bytes, and all entries together 200 times:
without limits, a few kilobytes of zstd unpack to gigabytes."""
WINDOW_BYTES_MAX = 16 << 20
"""Maximum memory that a file may demand from the decompressor."""
NOT_FACTS = frozenset({Stream.METRICS, Stream.TASKS, Stream.CREDITS, Stream.GATEWAY})
"""Streams that are not exported: telemetry, commands, and what gateways share for minutes."""


class _Object(msgspec.Struct, tag_field="kind", tag="object"):
    key: str
    data: bytes


class _Event(msgspec.Struct, tag_field="kind", tag="event"):
    data: bytes


class _ContentKey(ContentKey, frozen=True, tag_field="kind", tag="content_key"):
    pass


class _Header(msgspec.Struct):
    penstock_log: Any
    run_id: str


Entry = _Object | _Event | _ContentKey
_entries: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


def log_types() -> list[type[Event]]:
    """Return the event types that are exported."""
    return [event for event in EVENTS if event.stream not in NOT_FACTS]


async def export_log(
    bus: Bus, store: ObjectStore, path: Path, keys: Sequence[ContentKey] = ()
) -> int:
    """Write the log and its objects to a file, atomically; return the number of events.

    Args:
        path: The file, readable only by its owner.
        keys: Content keys of users to include.

    Raises:
        CorruptDataError: An object that an event names is missing or damaged; nothing is written.

    """
    count = 0
    with (
        new_private_file(path) as file,
        zstandard.ZstdCompressor(3, write_checksum=True).stream_writer(file, closefd=False) as out,
    ):
        _write(out, {"penstock_log": FORMAT, "run_id": bus.run_id})
        for content_key in keys:
            fields = msgspec.structs.asdict(content_key)
            _write(out, {"kind": "content_key", **fields})
        for key in await store.keys(""):
            if key.startswith(CLAIM_PREFIX):
                continue  # Written with the event that names it.
            if key.startswith((KEYS_PREFIX, REWRAPPED_PREFIX)):
                continue  # Wrapped for this run's vault alone.
            if key.startswith((SNAPSHOT_PREFIX, ARCHIVE_PREFIX)):
                continue  # They name sequences, which an import gives anew.
            _write(out, {"kind": "object", "key": key, "data": await store.get(key)})
        async for delivery in bus.follow(log_types(), stop_at_end=True):
            # Before their event, so that an import can check them in one pass.
            for claim in delivery.event.claims:
                data = await _fetch(store, claim, delivery.subject)
                _write(out, {"kind": "object", "key": claim.object_key, "data": data})
            _write(
                out,
                {
                    "kind": "event",
                    "stream": str(delivery.stream),
                    "sequence": delivery.sequence,
                    "stored_at": delivery.stored_at,
                    "data": encode(delivery.event),
                },
            )
            count += 1
    return count


async def import_log(bus: Bus, store: ObjectStore, path: Path, vault: Vault) -> int:
    """Write a file's objects and events to an empty server, in the file's order.

    Raises:
        CorruptDataError: The file is not a log, is truncated, lacks an object that an event names,
            or has two keys of one user.

    """
    count = 0
    batch: list[Event] = []
    for entry in read_entries(path):
        if isinstance(entry, _ContentKey):
            await vault.put_in(entry)
            continue
        if isinstance(entry, _Object):
            if entry.key.startswith((KEYS_PREFIX, REWRAPPED_PREFIX)):
                raise CorruptDataError(f"{path}: object {entry.key} belongs to another run's vault")
            await store.put(entry.key, entry.data)
            continue
        message = decode(entry.data)
        if not isinstance(message, Event):
            raise CorruptDataError(f"{path}: {type(message).__name__} is not an event")
        # Checked before the event is published: a log must not name objects that do not exist.
        for claim in message.claims:
            await _fetch(store, claim, f"{path}: {type(message).__name__} {message.key()}")
        batch.append(message)
        # In batches, because every publish waits for the server.
        if len(batch) == 256:
            await bus.publish(batch)
            count, batch = count + len(batch), []
    await bus.publish(batch)
    return count + len(batch)


async def _fetch(store: ObjectStore, claim: Claim, where: str) -> bytes:
    try:
        return await fetch(store, claim)
    except CodecError as error:
        raise CorruptDataError(f"{where}: {error}") from error


def read_header(path: Path) -> str:
    """Return the run id of a log file, checked to be a valid folder name."""
    with path.open("rb") as file:
        return _header(_frames(file, path), path).run_id


def read_entries(path: Path) -> Iterator[Entry]:
    """Yield the entries after the header."""
    with path.open("rb") as file:
        frames = _frames(file, path)
        _header(frames, path)
        for frame in frames:
            try:
                yield parse_with(_entries, frame, "entry")
            except CodecError as error:
                raise CorruptDataError(f"{path}: a damaged entry: {error}") from error


def _write(out: Any, entry: dict[str, Any]) -> None:
    data = msgspec.msgpack.encode(entry)
    out.write(struct.pack("<I", len(data)) + data)


def _header(frames: Iterator[bytes], path: Path) -> _Header:
    try:
        header = parse_msgpack(next(frames), _Header, "header")
    except (StopIteration, CodecError) as error:
        raise CorruptDataError(f"{path}: not a penstock log") from error
    check_format(header.penstock_log, str(path))
    try:
        check_run_id(header.run_id)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return header


def _frames(file: BinaryIO, path: Path) -> Iterator[bytes]:
    file_bytes = os.fstat(file.fileno()).st_size
    entry_max = SLACK_BYTES + ENTRY_RATIO_MAX * file_bytes
    left = SLACK_BYTES + TOTAL_RATIO_MAX * file_bytes
    decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
    with decompressor.stream_reader(file) as stream:
        while head := _read(stream, 4, path):
            (size,) = struct.unpack("<I", head)
            left -= size
            if size > entry_max or left < 0:
                raise CorruptDataError(f"{path}: unpacks to far more than its {file_bytes} bytes")
            body = _read(stream, size, path)
            if len(body) != size:
                raise CorruptDataError(f"{path}: cut short")
            yield body


def _read(stream: Any, size: int, path: Path) -> bytes:
    parts: list[bytes] = []
    left = size
    while left:
        try:
            part = stream.read(left)
        except zstandard.ZstdError as error:
            raise CorruptDataError(f"{path}: not a penstock log, or damaged: {error}") from error
        if not part:
            break
        parts.append(part)
        left -= len(part)
    data = b"".join(parts)
    if data and len(data) != size:
        raise CorruptDataError(f"{path}: cut short")
    return data
