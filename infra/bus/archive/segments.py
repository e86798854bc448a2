"""Segments of a stream in the object store: entries as in an exported log, and an index.

```
 archive/<stream>/<first>-<last>-<digest>.log      zstd of entries, each after its length (u32)
 archive/<stream>/<first>-<last>-<digest>.index    what readers check before they read the entries
```
Both names have the digest of the `.log`. The index is stored last and completes the segment; a
`.log` without an index was left by a killed archiver. Sequences are those of the stream.
"""

import struct
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import xxhash
import zstandard

from penstock.messages.base import FORMAT, Stream, check_format
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CorruptDataError
from penstock.messages.reading.parsing import parse_msgpack

ARCHIVE_PREFIX = "archive/"
SEGMENT_BYTES_MAX = 512 << 20
"""Maximum unpacked size of a segment; the archiver's are far smaller."""
_LENGTH = struct.Struct("<I")


class ArchivedEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="event"):
    """One stored message, unchanged from the stream."""

    stream: Stream
    sequence: int
    subject: str
    stored_at: float
    data: bytes
    is_claim: bool = False
    """Whether `data` is a claim of the whole event."""

    @property
    def type(self) -> str:
        """Name of the event's class."""
        return self.subject.split(".")[3]


class SegmentIndex(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a segment, and its former content if its retention has ended."""

    format: int = FORMAT
    first: int
    last: int
    first_at: float
    last_at: float
    """Unix time at which the newest event was stored."""
    num_bytes: int
    counts: dict[str, int]
    """Type -> number of archived events, including those that retention has deleted."""
    newest: dict[str, int]
    """Type -> sequence of the newest event that remains."""
    object_keys: list[str]
    """Objects that its events name."""
    subjects: bytes
    """Sorted 64-bit hashes of the subjects."""
    is_reduced: bool = False
    """Whether only what lineage needs remains."""

    def may_hold(self, subject: str) -> bool:
        """Return whether the segment may have an event of a subject; false positives are rare."""
        hashes = array("Q", self.subjects)
        wanted, low, high = subject_hash(subject), 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] < wanted:
                low = middle + 1
            else:
                high = middle
        return low < len(hashes) and hashes[low] == wanted


class SegmentKey(msgspec.Struct, frozen=True, order=True):
    """Name of a complete segment."""

    first: int
    last: int
    path: str
    """Object key without its suffix."""


def subject_hash(subject: str) -> int:
    """Return the hash of a subject in an index."""
    return xxhash.xxh3_64_intdigest(subject.encode())


async def segment_keys(store: ObjectStore, stream: Stream) -> list[SegmentKey]:
    """Return the complete segments of a stream in order, one per range."""
    found: dict[tuple[int, int], SegmentKey] = {}
    for key in await store.keys(f"{ARCHIVE_PREFIX}{stream}/"):
        if key.endswith(".index"):
            path = key.removesuffix(".index")
            first, last, _ = path.rpartition("/")[2].split("-")
            found[int(first), int(last)] = SegmentKey(int(first), int(last), path)
    return sorted(found.values())


async def store_segment(
    store: ObjectStore,
    stream: Stream,
    events: Sequence[ArchivedEvent],
    *,
    object_keys: Iterable[str],
    before: SegmentIndex | None = None,
) -> SegmentIndex:
    """Store events of a stream, in order, as one segment.

    Args:
        store: Object store.
        stream: Name of the stream.
        events: Events; at least one, unless `before` is given.
        object_keys: Objects that they refer to.
        before: Index of the segment of which these events remain.

    """
    body = b"".join(_entry(each) for each in events)
    data = zstandard.ZstdCompressor(3, write_checksum=True).compress(body)
    newest = {each.type: each.sequence for each in events}
    index = SegmentIndex(
        first=before.first if before else events[0].sequence,
        last=before.last if before else events[-1].sequence,
        first_at=before.first_at if before else events[0].stored_at,
        last_at=before.last_at if before else events[-1].stored_at,
        num_bytes=len(data),
        counts=before.counts if before else dict(Counter(each.type for each in events)),
        newest=newest,
        object_keys=sorted(object_keys),
        subjects=array("Q", sorted(subject_hash(each.subject) for each in events)).tobytes(),
        is_reduced=before is not None,
    )
    digest = xxhash.xxh3_128_hexdigest(data)
    path = f"{ARCHIVE_PREFIX}{stream}/{index.first:012d}-{index.last:012d}-{digest}"
    await store.put(f"{path}.log", data)
    await store.put(f"{path}.index", msgspec.msgpack.encode(index))
    return index


async def read_index(store: ObjectStore, key: SegmentKey) -> SegmentIndex:
    """Return the index of a segment.

    Raises:
        CorruptDataError: It is damaged.
        FormatError: Of another format.

    """
    name = f"{key.path}.index"
    found = parse_msgpack(await store.get(name), SegmentIndex, name)
    check_format(found.format, name)
    if (found.first, found.last) != (key.first, key.last):
        raise CorruptDataError(f"{name}: is the index of {found.first} to {found.last}")
    return found


async def read_segment(store: ObjectStore, key: SegmentKey) -> list[ArchivedEvent]:
    """Return the events of a segment.

    Raises:
        CorruptDataError: It is damaged.

    """
    name = f"{key.path}.log"
    data = await store.get(name)
    if xxhash.xxh3_128_hexdigest(data) != key.path.rpartition("-")[2]:
        raise CorruptDataError(f"{name}: the bytes do not match the digest in the name")
    try:
        body = zstandard.ZstdDecompressor().decompress(data, max_output_size=SEGMENT_BYTES_MAX)
    except zstandard.ZstdError as error:
        raise CorruptDataError(f"{name}: damaged: {error}") from error
    return [parse_msgpack(entry, ArchivedEvent, name) for entry in _entries(body, name)]


def _entry(event: ArchivedEvent) -> bytes:
    data = msgspec.msgpack.encode(event)
    return _LENGTH.pack(len(data)) + data


def _entries(body: bytes, name: str) -> Iterator[memoryview]:
    view, place = memoryview(body), 0
    while place < len(body):
        (size,) = _LENGTH.unpack_from(body, place) if place + 4 <= len(body) else (len(body),)
        place += 4
        if place + size > len(body):
            raise CorruptDataError(f"{name}: cut short")
        yield view[place : place + size]
        place += size
