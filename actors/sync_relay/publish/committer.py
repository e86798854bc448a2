"""What many ranks uploaded becomes one version: complete, proved, committed once.

The committer holds no weights: ranks tell it what they stored, provers what that is. So it needs
a receipt of every rank, a proof of every span, and the digest of the version before.
"""

import asyncio
from collections.abc import Sequence
from itertools import repeat

from penstock.actors.sync_relay.core.digests import DigestTable, add_to_digest
from penstock.actors.sync_relay.core.flat_snapshot import Table, table_digest
from penstock.actors.sync_relay.core.objects import Encoded, Origin
from penstock.actors.sync_relay.core.transfer import Sleep, bounded
from penstock.actors.sync_relay.publish.attempt import (
    Draft,
    Proof,
    Receipt,
    await_keys,
    draft_key,
    join_proofs,
    proof_key,
    put_note,
    read_note,
    receipts_prefix,
)
from penstock.actors.sync_relay.publish.history import History, check_same, read_committed
from penstock.actors.sync_relay.publish.shipping import Offload, seal_version
from penstock.actors.sync_relay.publish.spans import Span, check_cover
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CorruptDataError, DeadlineError
from penstock.messages.weights import WeightsPublished

_NAMED_MAX = 8


class Committer:
    """One per run, beside any of the ranks."""

    def __init__(  # noqa: PLR0913 - of whom, of what, where to
        self,
        store: ObjectStore,
        num_ranks: int,
        table: Table,
        spans: Sequence[Span],
        *,
        sleep: Sleep = asyncio.sleep,
        offload: Offload = asyncio.to_thread,
    ) -> None:
        """Prepare; nothing is read or claimed yet.

        Args:
            store: the origin.
            num_ranks: who ship.
            table: of the whole snapshot.
            spans: of its provers; see `spans.cut_spans`.
            sleep: waits between attempts.
            offload: runs blocking work.

        """
        self._store = store
        self._num_ranks = num_ranks
        self._table = table
        self._spans = spans
        self._sleep = sleep
        self._offload = offload
        self._history = History(store, sleep)
        self._newest: WeightsPublished | None = None

    async def begin(self, *, fresh: bool = False) -> int:
        """Claim the head, or see that it is still ours; return the token to ship under.

        Args:
            fresh: take another token, so that nothing of an attempt that failed counts.

        Raises:
            StaleTokenError: another committer took over.

        """
        await self._history.head.hold(fresh=fresh)
        return self._history.head.token

    async def commit(
        self, version: int, *, optimizer_step: int, config_json: str = "", wait_s: float = 600.0
    ) -> WeightsPublished:
        """Wait for all receipts, then all proofs, and make the version the head.

        Args:
            version: the one after the head's, or an older one again.
            optimizer_step: that made it.
            config_json: the policy's, for version 0.
            wait_s: for the receipts, and again for the proofs.

        Raises:
            DeadlineError: ranks or provers of which nothing came; the head is where it was.
            CorruptDataError: what ranks shipped is not one version: runs that came from nobody or
                from two, shards that were made against another base, digests that do not add up.
            StaleTokenError: another committer took over.
            PublishConflictError: this version was committed before, from other weights.
            OSError: no room, or objects that are damaged attempt after attempt.

        """
        token = await self.begin()
        shards = await self._gather(version, token, wait_s)
        before = await self._before(version)
        origin = self._history.next_origin(version, before, optimizer_step, config_json)
        digests = await self._prove(origin, shards, wait_s)
        manifest = await self._history.known(version)
        if manifest is not None:
            check_same(manifest, digests.root_digest())
        else:
            manifest = await seal_version(
                self._store, origin, self._table, digests, shards, self._sleep, self._offload
            )
        await self._history.commit(manifest)
        self._newest = manifest
        await self._collect(version, token)
        return manifest

    async def _before(self, version: int) -> WeightsPublished | None:
        """Return the manifest of a version's base."""
        if version == 0:
            return None
        if self._newest is not None and self._newest.policy_version == version - 1:
            return self._newest
        return await read_committed(self._store, version - 1, self._history.head.last)

    async def _collect(self, version: int, token: int) -> None:
        """Delete what led to a committed version, and what came late to the last one."""
        for old in (version, max(0, version - 1)):
            keys = await self._store.keys(receipts_prefix(old))
            done_with = [key for key in keys if key < receipts_prefix(old, token + 1)]
            await bounded(map(self._store.delete, done_with), repeat(0))

    async def _gather(self, version: int, token: int, wait_s: float) -> list[Encoded]:
        """Return the shards of all ranks, in order."""
        prefix = receipts_prefix(version, token)
        wanted = [f"{prefix}{rank:05d}" for rank in range(self._num_ranks)]
        await self._await(wanted, f"ranks of weights {version}", wait_s)
        notes = (read_note(self._store, key, Receipt, self._sleep) for key in wanted)
        receipts = await bounded(notes, repeat(0))
        for receipt in receipts:
            if receipt.table_digest != table_digest(self._table):
                raise CorruptDataError(f"rank {receipt.rank}: its table of tensors is another one")
        shards = [shard for receipt in receipts for shard in receipt.shards]
        check_cover([shard.ref.extents for shard in shards], self._spans)
        return sorted(shards, key=lambda shard: shard.ref.shard_id)

    async def _await(self, wanted: Sequence[str], who: str, wait_s: float) -> None:
        """Wait for numbered notes; the last of their keys' numbers are whose they are."""
        prefix, everyone = wanted[0][:-5], set(wanted)
        found = await await_keys(
            self._store, prefix, everyone.issubset, wait_s=wait_s, sleep=self._sleep
        )
        if missing := sorted(everyone - set(found)):
            numbers = [int(key[-5:]) for key in missing[:_NAMED_MAX]]
            raise DeadlineError(
                f"{len(missing)} of {len(wanted)} {who} left nothing under"
                f" token {self._history.head.token} in {wait_s:g} s: {numbers}"
            )

    async def _prove(self, origin: Origin, shards: list[Encoded], wait_s: float) -> DigestTable:
        """Have the shards read back; return what the version digests to."""
        draft = Draft(shards=shards)
        key = draft_key(origin.policy_version, origin.fencing_token, draft)
        wanted = [proof_key(key, number) for number in range(len(self._spans))]
        who = f"weights {origin.policy_version}"
        await put_note(self._store, key, draft, self._sleep)
        try:
            await self._await(wanted, f"provers of {who}", wait_s)
            notes = (read_note(self._store, name, Proof, self._sleep) for name in wanted)
            proof = join_proofs(await bounded(notes, repeat(0)))
        finally:
            await self._store.delete(key)
        if proof.error:
            raise CorruptDataError(f"{who}: {proof.error}")
        change = sum(shard.change for shard in shards)
        if add_to_digest("", proof.element_sum) != add_to_digest(
            origin.base_element_digest, change
        ):
            raise CorruptDataError(f"{who}: the ranks' digests do not add up")
        return proof.digests
