"""The head of a run's weights: a log of slots, each written once, which acts as compare-and-swap.

```
 weights/head/00000000  token 1 claims                  A writes after the last slot it knows.
 weights/head/00000001  token 1: version 0              A put that finds other bytes in its slot
 weights/head/00000002  token 1: version 1              has lost: somebody wrote there first.
 weights/head/00000003  token 2 claims, at version 1  ◀─ a second publisher takes over
              ✗ 00000003  token 1: version 2          ◀─ the first one's swap fails: it is fenced
```
Any store whose put refuses to overwrite can hold the head: a directory, JetStream, S3. The head is
the source of truth; events only announce that it moved.
"""

import asyncio
import logging
import secrets

import msgspec

from penstock.actors.relay.core.objects import PREFIX, manifest_key
from penstock.actors.relay.core.store_io import StoreIO
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CorruptDataError, NotFoundError, PenstockError
from penstock.messages.reading.parsing import parse_msgpack
from penstock.messages.weights import WeightsPublished

log = logging.getLogger(__name__)

SLOTS = f"{PREFIX}head/"
_NUM_CLAIMS_MAX = 16
"""Largest number of lost races for a token before a publisher gives up."""
_NUM_LOOKS_MAX = 8
"""Largest number of listings whose newest slot is deleted before it can be read."""
_NUM_SLOTS_KEPT = 64
"""Number of slots kept. A writer that is further behind finds a newer slot when it reads the head.
"""


class StaleTokenError(PenstockError, PermissionError):
    """A newer publisher has taken over this run; this one must stop."""


class HeadSlot(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the head's log."""

    number: int
    token: int
    """Fencing token of the publisher that wrote the slot."""
    policy_version: int
    """Newest committed version; -1: none."""
    root_digest: str = ""
    manifest_key: str = ""
    """Key of the committed version's manifest; other manifests of the version do not count."""
    owner: str = ""
    """Random id of the publisher, which makes slots of publishers that race for a token differ."""

    @property
    def node(self) -> tuple[int, str]:
        """Version and root digest, which identify the weights."""
        return self.policy_version, self.root_digest


NO_HEAD = HeadSlot(number=-1, token=0, policy_version=-1)
"""Head of a store to which nothing was published."""


async def read_head(store: ObjectStore) -> HeadSlot:
    """Return the newest slot, or `NO_HEAD`.

    Raises:
        CorruptDataError: The slot is damaged.

    """
    return (await _read_slots(store))[1]


async def _read_slots(store: ObjectStore) -> tuple[list[str], HeadSlot]:
    """Return the keys of all slots, and the newest slot."""
    for _ in range(_NUM_LOOKS_MAX):
        keys = await store.keys(SLOTS)
        if not keys:
            return keys, NO_HEAD
        if (newest := await _find(store, keys[-1])) is not None:
            return keys, newest
        # So many slots were written since the listing that this one was deleted: list again.
    raise CorruptDataError(f"{SLOTS}: the newest slot is listed but cannot be read")


async def read_head_after(store: ObjectStore, known: HeadSlot) -> HeadSlot:
    """Return the newest slot, in one round trip if it directly follows a known slot.

    Raises:
        CorruptDataError: The slot is damaged.

    """
    # Slots are written and deleted in order, so a slot without a successor is the newest.
    numbers = (known.number + 1, known.number + 2)
    newer, after = await asyncio.gather(*(_find(store, _slot_key(n)) for n in numbers))
    return newer if newer is not None and after is None else await read_head(store)


async def _find(store: ObjectStore, key: str) -> HeadSlot | None:
    try:
        return _decode(key, await store.get(key))
    except NotFoundError:
        return None


class FencedHead:
    """The head as held by one publisher under a fencing token."""

    def __init__(self, io: StoreIO) -> None:
        self._io = io
        self._owner = secrets.token_hex(8)
        self._last = NO_HEAD
        self.token = 0
        """Fencing token of this publisher; 0 until it has claimed one."""

    @property
    def last(self) -> HeadSlot:
        """Newest slot as this publisher last read or wrote it."""
        return self._last

    async def hold(self, *, new_token: bool = False) -> None:
        """Claim a token higher than any before, or check that the one held is still the newest.

        Args:
            new_token: Whether to claim a new token even if the one held is still the newest.

        Raises:
            StaleTokenError: Another publisher has claimed.

        """
        for _ in range(_NUM_CLAIMS_MAX):
            head = await read_head(self._io.store)
            if self.token:
                self._check(head)
                if not new_token:
                    return
            claim = msgspec.structs.replace(
                head, number=head.number + 1, token=head.token + 1, owner=self._owner
            )
            # Losing the race for a slot means that another publisher wrote it: read it and retry.
            if await self._put(claim):
                self.token = claim.token
                log.info("claimed fencing token %d at version %d", self.token, head.policy_version)
                return
            log.warning("lost the race for fencing token %d", claim.token)
        raise StaleTokenError(f"fencing token: lost {_NUM_CLAIMS_MAX} races against others")

    async def advance(self, manifest: WeightsPublished) -> None:
        """Commit a stored version, unless another publisher has written a slot in between.

        Raises:
            StaleTokenError: Another publisher has written a slot.

        """
        slot = msgspec.structs.replace(
            self._last,
            number=self._last.number + 1,
            token=self.token,
            policy_version=manifest.policy_version,
            root_digest=manifest.target_root_digest,
            manifest_key=manifest_key(manifest),
            owner=self._owner,
        )
        if not await self._put(slot):
            self._check(await read_head(self._io.store))
            raise StaleTokenError(
                f"head slot {slot.number}: another publisher wrote it with the same token"
            )
        # A stale publisher may write into a slot that was already deleted: that put succeeds, but
        # newer slots exist, and the check below finds them.
        keys, head = await _read_slots(self._io.store)
        self._check(head)
        for old in keys[:-_NUM_SLOTS_KEPT]:
            await self._io.store.delete(old)

    async def _put(self, slot: HeadSlot) -> bool:
        try:
            data = msgspec.msgpack.encode(slot)
            await self._io.put_once(_slot_key(slot.number), data)
        # Other bytes in the slot: another publisher wrote it first.
        except CorruptDataError:
            return False
        self._last = slot
        return True

    def _check(self, head: HeadSlot) -> None:
        if head.token > self.token:
            raise StaleTokenError(
                f"fencing token {self.token}: a newer publisher with token {head.token}"
                " has taken over"
            )
        self._last = head


def _slot_key(number: int) -> str:
    return f"{SLOTS}{number:08d}"


def _decode(key: str, data: bytes) -> HeadSlot:
    try:
        slot = parse_msgpack(data, HeadSlot, "slot")
    except ValueError as error:
        raise CorruptDataError(f"object {key}: not a slot of the head: {error}") from error
    if slot.policy_version >= 0 and not slot.manifest_key:
        raise CorruptDataError(
            f"object {key}: it names no manifest, as an older Penstock wrote it; start a new run"
        )
    return slot
