"""What many ranks uploaded becomes one version: complete, proved, committed once.

Proved means read back: the committer writes every shard into a copy of the base, and digests that.
So tensors that are split among ranks have the same digests as whole ones, what is committed is what
the store really holds, and nothing downstream knows how the trainer was cut. It takes one copy of
the snapshot, two while it commits, and the bytes of a delta once more.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from penstock.actors.sync_relay.digests import add_to_digest
from penstock.actors.sync_relay.history import History
from penstock.actors.sync_relay.image import Image, Table, table_digest
from penstock.actors.sync_relay.objects import Encoded, decode_shards
from penstock.actors.sync_relay.ranks import Receipt, receipts_prefix
from penstock.actors.sync_relay.shipping import Offload, seal_version
from penstock.actors.sync_relay.transfer import (
    Sleep,
    bounded,
    get_patiently,
    over_shards,
)
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CorruptDataError, DeadlineError
from penstock.messages.weights import ShardRef, WeightsPublished

_POLL_S = 0.1
_RANKS_NAMED_MAX = 8


class Committer:
    """One a run, beside any of the ranks."""

    def __init__(
        self,
        store: ObjectStore,
        num_ranks: int,
        table: Table,
        *,
        sleep: Sleep = asyncio.sleep,
        offload: Offload = asyncio.to_thread,
    ) -> None:
        """Prepare; nothing is read or claimed yet."""
        self._store = store
        self._num_ranks = num_ranks
        self._table = table
        self._sleep = sleep
        self._offload = offload
        self._history = History(store, sleep, offload)

    async def begin(self) -> int:
        """Claim the head, or see that it is still ours; return the token to ship under.

        Raises:
            StaleTokenError: another committer took over.

        """
        await self._history.head.hold()
        return self._history.head.token

    async def commit(
        self, version: int, *, optimizer_step: int, config_json: str = "", wait_s: float = 600.0
    ) -> WeightsPublished:
        """Wait for every rank's receipt, prove the version and make it the head.

        Raises:
            DeadlineError: ranks whose receipts did not come; the head is where it was.
            CorruptDataError: what ranks shipped is not one version: runs that came from nobody or
                from two, shards that were made against another base, digests that do not add up.
            StaleTokenError: another committer took over.
            PublishConflictError: this version was committed before, from other weights.
            OSError: no room, or objects that are damaged attempt after attempt.

        """
        token = await self.begin()
        receipts = await self._gather(version, token, wait_s)
        shards = self._all_shards(receipts)
        origin, base = await self._history.next_origin(
            version, self._table, optimizer_step, config_json
        )
        image = await self._offload(Image, self._table) if base is None else base.copy()
        await over_shards(lambda ref: self._take(image, ref), [shard.ref for shard in shards])
        change = sum(shard.change for shard in shards)
        digest = add_to_digest(origin.base_element_digest, change)
        if await self._offload(image.element_digest) != digest:
            raise CorruptDataError(f"weights {version}: the ranks' digests do not add up")
        manifest = await self._history.known(version, image)
        if manifest is None:
            manifest = await seal_version(
                self._store, origin, image, shards, self._sleep, self._offload
            )
        await self._history.commit(image, manifest)
        await self._collect(version, token)
        return manifest

    async def _collect(self, version: int, token: int) -> None:
        """Delete the receipts of a committed version, and those that came late to the last one."""
        for old in (version, max(0, version - 1)):
            for key in await self._store.keys(receipts_prefix(old)):
                if key < receipts_prefix(old, token + 1):
                    await self._store.delete(key)

    async def _gather(self, version: int, token: int, wait_s: float) -> list[Receipt]:
        prefix = receipts_prefix(version, token)
        wanted = {f"{prefix}{rank:05d}" for rank in range(self._num_ranks)}
        missing = wanted
        now_s = asyncio.get_running_loop().time
        until_s = now_s() + wait_s
        for _ in range(int(wait_s / _POLL_S) + 1):
            missing = wanted - set(await self._store.keys(prefix))
            if not missing:
                return await bounded(map(self._read, sorted(wanted)))
            if now_s() >= until_s:
                break
            await self._sleep(_POLL_S)
        ranks = [int(key.removeprefix(prefix)) for key in sorted(missing)[:_RANKS_NAMED_MAX]]
        raise DeadlineError(
            f"weights {version}: {len(missing)} of {self._num_ranks} ranks shipped nothing under"
            f" token {token} in {wait_s:g} s: {ranks}"
        )

    async def _read(self, key: str) -> Receipt:
        try:
            receipt = msgspec.msgpack.decode(await self._store.get(key), type=Receipt)
        except msgspec.DecodeError as error:
            raise CorruptDataError(f"object {key}: not a receipt: {error}") from error
        if receipt.table_digest != table_digest(self._table):
            raise CorruptDataError(f"rank {receipt.rank}: its table of tensors is another one")
        return receipt

    def _all_shards(self, receipts: Sequence[Receipt]) -> list[Encoded]:
        """Return all shards, in order, if they cover every element once."""
        shards = [shard for receipt in receipts for shard in receipt.shards]
        runs = sorted((r.start, r.num_elements) for shard in shards for r in shard.ref.extents)
        end = 0
        for start, num_elements in [*runs, (sum(spec.size for spec in self._table), 0)]:
            if start != end:
                who = "nobody" if start > end else "two ranks"
                span = f"{min(start, end)} to {max(start, end)}"
                raise CorruptDataError(f"ranks: elements {span} came from {who}")
            end = start + num_elements
        return sorted(shards, key=lambda shard: shard.ref.shard_id)

    async def _take(self, image: Image, shard: ShardRef) -> None:
        """Fetch a shard, and write it over its part of the base."""
        data = await get_patiently(self._store, shard, self._sleep)
        await self._offload(await self._offload(decode_shards, image, [shard], [data]))
