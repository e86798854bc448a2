"""What ranks, provers and committer leave each other in the store, for one attempt at a version.

```
 weights/00000007/delta/receipt-<token>-00003              rank 3: these shards are uploaded
 weights/00000007/delta/receipt-<token>-draft-<blake3>     committer: all of them make this version
 weights/00000007/delta/receipt-<token>-proof-<blake3>-00001   prover 1: they read back as this
```
A token is that of one attempt, so nothing of two attempts is mixed.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec
from blake3 import blake3

from penstock.actors.sync_relay.core.digests import SUM_MODULUS, DigestTable, join_tables
from penstock.actors.sync_relay.core.objects import Encoded
from penstock.actors.sync_relay.core.transfer import Sleep, patiently, put_object
from penstock.actors.sync_relay.publish.history import delta_folder
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CorruptDataError

_POLL_S_MIN, _POLL_S_MAX = 0.01, 0.16
_NUM_KEY_DIGITS = 16
_CHECK_BYTES = 16
"""In front of every note, of what follows."""
Note = TypeVar("Note", bound=msgspec.Struct)


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank stored."""

    rank: int
    table_digest: str
    shards: list[Encoded]


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """The shards of all ranks, which cover every element once."""

    shards: list[Encoded]


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What one prover's tensors are, read back from the store."""

    digests: DigestTable
    element_sum: int
    """Over all its elements, in the whole snapshot's flat coordinates."""
    error: str = ""
    """Why its shards are not the next version of its tensors."""


def join_proofs(parts: Iterable[Proof]) -> Proof:
    """Make one proof of those of different tensors, with the first error of any."""
    proofs = list(parts)
    return Proof(
        digests=join_tables(proof.digests for proof in proofs),
        element_sum=sum(proof.element_sum for proof in proofs) % SUM_MODULUS,
        error=next((proof.error for proof in proofs if proof.error), ""),
    )


def receipts_prefix(version: int, token: int | None = None) -> str:
    """Return the common start of the keys of one attempt, or of all; ranks follow."""
    attempt = "" if token is None else f"{token:08d}-"
    return f"{delta_folder(version)}receipt-{attempt}"


def drafts_prefix(version: int, token: int) -> str:
    """Return the common start of the keys of one attempt's drafts."""
    return f"{receipts_prefix(version, token)}draft-"


def draft_key(version: int, token: int, draft: Draft) -> str:
    """Return where a draft lies."""
    digest = blake3(msgspec.msgpack.encode(draft)).hexdigest()[:_NUM_KEY_DIGITS]
    return f"{drafts_prefix(version, token)}{digest}"


def proof_key(draft: str, number: int) -> str:
    """Return where one prover's proof of the draft of this key lies."""
    return f"{draft.replace('draft-', 'proof-')}-{number:05d}"


async def put_note(store: ObjectStore, key: str, note: msgspec.Struct, sleep: Sleep) -> None:
    """Leave a receipt, a draft or a proof.

    Raises:
        OSError: no room, after several attempts.

    """
    data = msgspec.msgpack.encode(note)
    await put_object(store, key, _check(data) + data, sleep)


async def read_note(store: ObjectStore, key: str, note_type: type[Note], sleep: Sleep) -> Note:
    """Read what another left, several times if need be.

    Raises:
        DamagedStoreError: it came damaged, or not at all, every time.

    """

    async def read() -> Note:
        data = await store.get(key)
        if _check(data[_CHECK_BYTES:]) != data[:_CHECK_BYTES]:
            raise CorruptDataError(f"object {key}: not a {note_type.__name__.lower()}")
        return msgspec.msgpack.decode(data[_CHECK_BYTES:], type=note_type)

    return await patiently(read, sleep)


def _check(data: bytes) -> bytes:
    return blake3(data).digest(_CHECK_BYTES)


async def await_keys(
    store: ObjectStore,
    prefix: str,
    are_enough: Callable[[list[str]], bool],
    *,
    wait_s: float,
    sleep: Sleep,
) -> list[str]:
    """Return the keys under a prefix once they are enough, or as they are after `wait_s`."""
    now_s = asyncio.get_running_loop().time
    until_s, poll_s = now_s() + wait_s, _POLL_S_MIN
    keys = await store.keys(prefix)
    for _ in range(int(wait_s / _POLL_S_MIN)):
        if are_enough(keys) or now_s() >= until_s:
            break
        await sleep(poll_s)
        poll_s = min(2 * poll_s, _POLL_S_MAX)
        keys = await store.keys(prefix)
    return keys
