"""Objects that events name: read with their digest checked, and a name that is no claim refused."""

import re
import time

from blake3 import blake3

from penstock.messages.base import Claim
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import (
    CodecError,
    CorruptDataError,
    NotFoundError,
    StoreUnreachableError,
)
from penstock.messages.reading.parsing import INPUT_BYTES_MAX
from penstock.messages.retries import RetryPolicy, with_retries

CLAIM_PREFIX = "claims/"
_KEY = re.compile(r"claims/[0-9a-z-]{1,64}")
_AWAY = RetryPolicy(pause_s=0.5, pause_s_max=4.0, deadline_s=60.0)
"""A store that does not answer is asked again: its absence says nothing about the object."""
FRESH_S = 60.0
_ONCE = RetryPolicy(pause_s=0.0, num_attempts_max=1)
_LAGGING = RetryPolicy(pause_s=0.05, pause_s_max=0.4, deadline_s=1.0)
"""Of a fresh object that is not there: a replica that answers may lag behind its leader."""


def claim_key(created_s: float, name: str) -> str:
    """Return a new object's key; `name` makes it unique, letters a-z, digits and hyphens.

    It begins with the time of its making in unix seconds, so that a collector can tell an object
    whose event is still on its way from one that nothing names.
    """
    return f"{CLAIM_PREFIX}{int(created_s):010d}-{name}"


def created_at(key: str) -> float:
    """Return when an object was made, from its key; 0 where the key says nothing."""
    head = key.removeprefix(CLAIM_PREFIX).partition("-")[0]
    return float(head) if head.isascii() and head.isdigit() else 0.0


def digest_of(data: bytes) -> str:
    """Return what `Claim.blake3` says of these bytes."""
    return blake3(data).hexdigest()


async def fetch(store: ObjectStore, claim: Claim) -> bytes:
    """Return the bytes that a claim names.

    Raises:
        CodecError: No key of a claim, no such object, or one with other bytes than claimed: trying
            again changes nothing.
        StoreUnreachableError: The store did not answer within a minute.

    """
    key = claim.object_key
    if not _KEY.fullmatch(key):
        raise CodecError(f"claim: expected a key claims/<time>-<name>, got {key[:80]!r}")
    if claim.num_bytes > INPUT_BYTES_MAX:
        raise CodecError(f"claim: {key} has {claim.num_bytes} bytes, at most {INPUT_BYTES_MAX} may")

    async def read() -> bytes:
        return await with_retries(lambda: store.get(key), _AWAY, retry_on=(StoreUnreachableError,))

    is_fresh = abs(time.time() - created_at(key)) < FRESH_S
    absent = (NotFoundError, CorruptDataError)
    try:
        data = await with_retries(read, _LAGGING if is_fresh else _ONCE, retry_on=absent)
    except absent as error:
        raise CodecError(f"claim: {error}") from error
    if len(data) != claim.num_bytes or digest_of(data) != claim.blake3:
        raise CodecError(f"claim: object {key} has other bytes than claimed")
    return data
