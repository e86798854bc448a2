"""Keys of stored objects, and reads of claimed objects with their size and digest checked."""

import logging
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

log = logging.getLogger(__name__)

CLAIM_PREFIX = "claims/"
_KEY = re.compile(r"claims/[0-9a-z-]{1,64}")
# Retries while the store is unreachable, which says nothing about the object itself.
_UNREACHABLE_RETRIES = RetryPolicy(pause_s=0.5, pause_s_max=4.0, deadline_s=60.0)
FRESH_S = 60.0
"""Age in seconds up to which an object may not have reached every replica of the store."""
_NO_RETRIES = RetryPolicy(pause_s=0.0, num_attempts_max=1)
# Retries of a fresh object that is missing: the replica that answered may lag its leader.
_LAG_RETRIES = RetryPolicy(pause_s=0.05, pause_s_max=0.4, deadline_s=1.0)


def claim_key(created_s: float, name: str) -> str:
    """Return a new object's key, made of its creation time and a name.

    The time lets the collector tell an object whose event is still being published from one that
    no event names.

    Args:
        created_s: Creation time in Unix seconds.
        name: Unique name of letters a-z, digits and hyphens.

    """
    return f"{CLAIM_PREFIX}{int(created_s):010d}-{name}"


def created_at(key: str) -> float:
    """Return an object's creation time in Unix seconds, from its key; 0 if the key has none."""
    head = key.removeprefix(CLAIM_PREFIX).partition("-")[0]
    return float(head) if head.isascii() and head.isdigit() else 0.0


def digest_of(data: bytes) -> str:
    """Return the BLAKE3 digest of bytes, as in `Claim.blake3`."""
    return blake3(data).hexdigest()


async def fetch(store: ObjectStore, claim: Claim) -> bytes:
    """Return the bytes of a claimed object.

    Raises:
        CodecError: The key is not a claim's, or the object is missing or differs from the claim;
            retrying does not help.
        StoreUnreachableError: The store did not answer within a minute.

    """
    key = claim.object_key
    if not _KEY.fullmatch(key):
        # A forged event must not be able to read any other object of the store.
        raise CodecError(f"claim: expected a key claims/<time>-<name>, got {key[:80]!r}")
    # Refused before anything is fetched into memory.
    if claim.num_bytes > INPUT_BYTES_MAX:
        size = f"expected at most {INPUT_BYTES_MAX} bytes, got {claim.num_bytes}"
        raise CodecError(f"claim: {key}: {size}")

    async def read() -> bytes:
        return await with_retries(
            lambda: store.get(key), _UNREACHABLE_RETRIES, retry_on=(StoreUnreachableError,), log=log
        )

    # The absolute value, because the writer's clock may be ahead of this one.
    is_fresh = abs(time.time() - created_at(key)) < FRESH_S
    absent = (NotFoundError, CorruptDataError)
    try:
        data = await with_retries(read, _LAG_RETRIES if is_fresh else _NO_RETRIES, retry_on=absent)
    except absent as error:
        raise CodecError(f"claim: {error}") from error
    # The store is shared and may be damaged: no object is used before its digest is checked.
    if len(data) != claim.num_bytes or digest_of(data) != claim.blake3:
        raise CodecError(f"claim: object {key} does not match the claimed size and digest")
    return data
