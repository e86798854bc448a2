"""Commits one version from the uploads of many ranks, after checking and verifying them.

The committer holds no weights. It needs the upload of every rank, the verification of every span,
and the element digest of the version before.
"""

import logging
from collections.abc import Sequence
from itertools import repeat

from penstock.actors.relay.core.digests import DigestTable, add_to_digest
from penstock.actors.relay.core.flat_snapshot import Table, table_digest
from penstock.actors.relay.core.objects import EncodedObject, ManifestHeader
from penstock.actors.relay.core.store_io import StoreIO, gather_bounded
from penstock.actors.relay.publish.history import History, check_same, read_committed
from penstock.actors.relay.publish.publisher import seal_version
from penstock.actors.relay.publish.rank_attempt import (
    RankUpload,
    StagedManifest,
    Verification,
    attempt_prefix,
    await_keys,
    join_verifications,
    put_marker,
    read_marker,
    staged_key,
    verified_key,
)
from penstock.actors.relay.publish.spans import Span, check_cover
from penstock.messages.errors import CorruptDataError, DeadlineError
from penstock.messages.weights import WeightsPublished

log = logging.getLogger(__name__)

_NAMED_MAX = 8
"""Largest number of missing ranks that an error names."""


class Committer:
    """The committer of a run, which may run next to any of the ranks."""

    def __init__(self, io: StoreIO, num_ranks: int, table: Table, spans: Sequence[Span]) -> None:
        """Initialize without reading or claiming anything.

        Args:
            io: Origin store.
            num_ranks: Number of ranks that upload.
            table: Table of the whole snapshot.
            spans: Spans of the verifiers, from `spans.cut_spans`.

        """
        self._io = io
        self._num_ranks = num_ranks
        self._table = table
        self._spans = spans
        self._history = History(io)
        self._newest: WeightsPublished | None = None

    async def begin(self, *, new_token: bool = False) -> int:
        """Claim the head, or check that it is still held; return the token to upload under.

        Args:
            new_token: Whether to claim a new token, so that markers of a failed attempt do not
                count.

        Raises:
            StaleTokenError: Another committer took over.

        """
        await self._history.head.hold(new_token=new_token)
        return self._history.head.token

    async def commit(
        self,
        version: int,
        *,
        optimizer_step: int,
        config_json: str = "",
        probe: Sequence[float] = (),
        wait_s: float = 600.0,
    ) -> WeightsPublished:
        """Wait for all uploads and all verifications, then make the version the head.

        Args:
            version: The version after the head's, or an older one that is published again.
            optimizer_step: Step that produced the version.
            config_json: Configuration of the policy, for version 0.
            probe: Probe values that the trainer computed with the version.
            wait_s: Deadline in seconds for the uploads, and again for the verifications.

        Raises:
            DeadlineError: Some ranks or verifiers left no marker; the head has not moved.
            CorruptDataError: The uploads do not form one version: elements come from no rank or
                from two, shards were encoded against another base, or digests do not add up.
            StaleTokenError: Another committer took over.
            PublishConflictError: This version was already committed from other weights.
            OSError: The store has no room, or objects were damaged in every attempt.

        """
        token = await self.begin()
        shards = await self._gather(version, token, wait_s)
        before = await self._before(version)
        header = self._history.next_header(version, before, optimizer_step, config_json, probe)
        digests = await self._verify(header, shards, wait_s)
        manifest = await self._history.known(version)
        # A trainer that resumed from a checkpoint publishes committed versions again.
        if manifest is not None:
            check_same(manifest, digests.root_digest())
        else:
            manifest = await seal_version(self._io, header, self._table, digests, shards)
        await self._history.commit(manifest)
        self._newest = manifest
        # Also of the version before: a slow rank may have left its marker after that commit.
        for old in (version, max(0, version - 1)):
            keys = await self._io.store.keys(attempt_prefix(old))
            done_with = [key for key in keys if key < attempt_prefix(old, token + 1)]
            await gather_bounded(map(self._io.store.delete, done_with), repeat(0))
        return manifest

    async def _before(self, version: int) -> WeightsPublished | None:
        """Return the manifest of a version's base."""
        if version == 0:
            return None
        if self._newest is not None and self._newest.policy_version == version - 1:
            return self._newest
        return await read_committed(self._io.store, version - 1, self._history.head.last)

    async def _gather(self, version: int, token: int, wait_s: float) -> list[EncodedObject]:
        """Return the shards of all ranks, in order."""
        prefix = attempt_prefix(version, token)
        keys = [f"{prefix}{rank:05d}" for rank in range(self._num_ranks)]
        await self._await(keys, f"ranks of weights {version}", wait_s)
        uploads = await gather_bounded(
            (read_marker(self._io, key, RankUpload) for key in keys), repeat(0)
        )
        for upload in uploads:
            if upload.table_digest != table_digest(self._table):
                raise CorruptDataError(
                    f"rank {upload.rank}: its tensor table differs from the committer's"
                )
        shards = [shard for upload in uploads for shard in upload.shards]
        check_cover([shard.ref.extents for shard in shards], self._spans)
        return sorted(shards, key=lambda shard: shard.ref.shard_id)

    async def _await(self, keys: Sequence[str], who: str, wait_s: float) -> None:
        """Wait for numbered markers, whose keys end with the number of their writer."""
        prefix, expected = keys[0][:-5], set(keys)
        found = await await_keys(self._io, prefix, expected.issubset, wait_s=wait_s)
        if missing := sorted(expected - set(found)):
            numbers = [int(key[-5:]) for key in missing[:_NAMED_MAX]]
            raise DeadlineError(
                f"{len(missing)} of {len(keys)} {who} left no marker under"
                f" token {self._history.head.token} in {wait_s:g} s: {numbers}"
            )

    async def _verify(
        self, header: ManifestHeader, shards: list[EncodedObject], wait_s: float
    ) -> DigestTable:
        """Stage the shards for the verifiers, and return the digests that they read back."""
        staged = StagedManifest(shards=shards)
        key = staged_key(header.policy_version, header.fencing_token, staged)
        verified = [verified_key(key, number) for number in range(len(self._spans))]
        who = f"weights {header.policy_version}"
        await put_marker(self._io, key, staged)
        log.debug("weights %d: staged %d shards", header.policy_version, len(shards))
        try:
            await self._await(verified, f"verifiers of {who}", wait_s)
            parts = (read_marker(self._io, name, Verification) for name in verified)
            whole = join_verifications(await gather_bounded(parts, repeat(0)))
        finally:
            # A verifier that starts late must not verify an attempt that is over.
            await self._io.store.delete(key)
        if whole.error:
            raise CorruptDataError(f"{who}: {whole.error}")
        change = sum(shard.change for shard in shards)
        # Ranks computed the change from their own bases, verifiers the sum from the store: only if
        # both agree was every shard made against the committed base.
        if add_to_digest("", whole.element_sum) != add_to_digest(
            header.base_element_digest, change
        ):
            raise CorruptDataError(
                f"{who}: the element digests of the ranks' shards do not add up to the digest that"
                " the verifiers read back"
            )
        return whole.digests
