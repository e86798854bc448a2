"""Markers through which ranks, verifiers and committer communicate in one attempt at a version.

```
 weights/00000007/delta/attempt-<token>-00003                    rank 3: these shards are uploaded
 weights/00000007/delta/attempt-<token>-staged-<blake3>          committer: the shards of all ranks
 weights/00000007/delta/attempt-<token>-verified-<blake3>-00001  verifier 1: digests read back
```
They are objects in the origin store. Each attempt has its own token, so that markers of two
attempts are never mixed.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec
from blake3 import blake3

from penstock.actors.relay.core.digests import SUM_MODULUS, DigestTable, join_tables
from penstock.actors.relay.core.objects import EncodedObject
from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.history import delta_folder
from penstock.messages.errors import CorruptDataError
from penstock.messages.reading.parsing import parse_msgpack

VERSION_S_MAX = 6 * 3600.0
"""Deadline of one version in seconds; it is generous because version 0 is a full snapshot, and a
dead rank is detected by its silence."""
_POLL_S_MIN, _POLL_S_MAX = 0.01, 0.16
"""Shortest and longest pause between two listings, in seconds; the pause doubles in between."""
_NUM_KEY_DIGITS = 16
"""Number of hexadecimal digits of the hash in a key."""
_CHECK_BYTES = 16
"""Number of bytes of the checksum in front of every marker."""
Marker = TypeVar("Marker", bound=msgspec.Struct)


class RankUpload(msgspec.Struct, frozen=True, kw_only=True):
    """Marker of a rank: the shards that it stored."""

    rank: int
    table_digest: str
    shards: list[EncodedObject]


class StagedManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Marker of the committer: the shards of all ranks, which cover every element once."""

    shards: list[EncodedObject]


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """Marker of a verifier: digests of its tensors, read back from the store."""

    digests: DigestTable
    element_sum: int
    """Element sum over the verifier's tensors, in flat coordinates of the whole snapshot."""
    error: str = ""
    """Reason why the shards do not form the next version of the tensors; empty if they do."""


def join_verifications(parts: Iterable[Verification]) -> Verification:
    """Return one verification from those of different tensors, with the first error of any."""
    verifications = list(parts)
    return Verification(
        digests=join_tables(part.digests for part in verifications),
        element_sum=sum(part.element_sum for part in verifications) % SUM_MODULUS,
        error=next((part.error for part in verifications if part.error), ""),
    )


def attempt_prefix(version: int, token: int | None = None) -> str:
    """Return the key prefix of one attempt's markers, or of all attempts without a token."""
    # Zero-padded, so that keys sort by token and a committer can delete those of older attempts.
    attempt = "" if token is None else f"{token:08d}-"
    return f"{delta_folder(version)}attempt-{attempt}"


def staged_prefix(version: int, token: int) -> str:
    """Return the key prefix of one attempt's staged manifests."""
    return f"{attempt_prefix(version, token)}staged-"


def staged_key(version: int, token: int, staged: StagedManifest) -> str:
    """Return the key of a staged manifest."""
    digest = blake3(msgspec.msgpack.encode(staged)).hexdigest()[:_NUM_KEY_DIGITS]
    return f"{staged_prefix(version, token)}{digest}"


def verified_key(staged: str, number: int) -> str:
    """Return the key of one verifier's result for the staged manifest under the key `staged`."""
    return f"{staged.replace('staged-', 'verified-')}-{number:05d}"


async def put_marker(io: StoreIO, key: str, marker: msgspec.Struct) -> None:
    """Store a marker.

    Raises:
        OSError: The store has no room, after several attempts.

    """
    data = msgspec.msgpack.encode(marker)
    # The keys of ranks' markers contain no hash, so the checksum goes into the object.
    await io.put(key, _check(data) + data)


async def read_marker(io: StoreIO, key: str, marker_type: type[Marker]) -> Marker:
    """Read a marker, with retries.

    Raises:
        DamagedStoreError: The marker was damaged or missing in every attempt.

    """

    async def read() -> Marker:
        data = await io.store.get(key)
        if _check(data[_CHECK_BYTES:]) != data[:_CHECK_BYTES]:
            raise CorruptDataError(f"object {key}: not a {marker_type.__name__}")
        return parse_msgpack(data[_CHECK_BYTES:], marker_type, f"object {key}")

    return await io.read(read)


def _check(data: bytes) -> bytes:
    return blake3(data).digest(_CHECK_BYTES)


async def await_keys(
    io: StoreIO, prefix: str, are_enough: Callable[[list[str]], bool], *, wait_s: float
) -> list[str]:
    """Return the keys under a prefix once `are_enough` accepts them, or after `wait_s` seconds."""
    now_s = asyncio.get_running_loop().time
    until_s, poll_s = now_s() + wait_s, _POLL_S_MIN
    keys = await io.store.keys(prefix)
    for _ in range(int(wait_s / _POLL_S_MIN)):
        if are_enough(keys) or now_s() >= until_s:
            break
        await io.sleep(poll_s)
        # A small version is ready within milliseconds, a full snapshot after minutes: back off.
        poll_s = min(2 * poll_s, _POLL_S_MAX)
        keys = await io.store.keys(prefix)
    return keys
