"""Writes the records of replies to the log, or to disk until the log takes them.

No reply goes out unrecorded.
"""

import asyncio
import logging
from pathlib import Path

from penstock.actors.runtime.context import Context
from penstock.actors.runtime.vault import Vault
from penstock.gateway.config import GatewayConfig
from penstock.gateway.errors import ApiError
from penstock.gateway.exchange.spool import Spool
from penstock.gateway.record import (
    AnsweredRequest,
    RecordTerms,
    record_of,
    record_offline,
    resealed,
)
from penstock.messages.base import Event, Message
from penstock.messages.errors import CodecError, ErasedError, PenstockError
from penstock.messages.feedback import InferenceRecorded

DRAIN_S = 1.0
"""Seconds between attempts to move records from disk to the log."""
log = logging.getLogger(__name__)


class Recorder:
    """The only writer of records; while records wait on disk, new ones wait there as well."""

    def __init__(
        self, ctx: Context, config: GatewayConfig, vault: Vault, folder: Path, terms: RecordTerms
    ) -> None:
        """Open the spool, which may hold records of an earlier process.

        Args:
            ctx: Context of the gateway.
            config: Limits of the wait and of the disk space.
            vault: Encrypts what is stored.
            folder: Folder of the spool.
            terms: What may be stored of a record at the moment.

        """
        self._terms = terms
        self._ctx = ctx
        self._record_s_max = config.record_s_max
        self._vault = vault
        self._spool = Spool(folder, config.spool_bytes_max)

    @property
    def is_full(self) -> bool:
        """Whether the disk spool is full, so that requests must be refused."""
        return self._spool.is_full

    async def record(self, answered: AnsweredRequest) -> None:
        """Store the record of one reply.

        Raises:
            ApiError: 503, neither the log nor the disk accepts it.

        """
        answered = self._terms.pseudonymous(answered)
        # Records that wait come first: the turns of a session stay in order on the log.
        if self._spool.is_empty:
            try:
                async with asyncio.timeout(self._record_s_max):
                    await self._publish(await record_of(answered, self._vault))
            except (PenstockError, OSError, TimeoutError) as error:
                log.warning("record %s goes to the disk spool: %r", answered.request_id, error)
            else:
                return
        record = record_offline(answered, self._vault)
        # In a thread: it waits for fsync.
        try:
            await asyncio.to_thread(self._spool.put, answered.request_id, record)
        except (PenstockError, OSError) as error:
            log.error("record %s is lost, its reply is refused: %s", answered.request_id, error)  # noqa: TRY400
            text = f"neither the log nor the disk accepts the record of this reply: {error}"
            raise ApiError(503, "not_recorded", text, retry_after_s=5.0) from error

    def erase(self, tenant: str, user: str, erasures: int) -> None:
        """Remove what waits on this host and came from a user before an erasure."""
        if num := self._spool.erase(tenant, user, erasures):
            log.info("%d records of an erased user are removed from the disk spool", num)

    async def drain(self) -> None:
        """Move records from disk to the log, as long as the gateway runs."""
        while True:
            await self._ctx.sleep(DRAIN_S)
            if not self._spool.is_empty:
                await self._drain_once()

    async def _drain_once(self) -> None:
        """Publish the waiting records, oldest first, until the log refuses one."""
        num_drained = 0
        for path, record in self._spool.waiting():
            try:
                async with asyncio.timeout(self._record_s_max):
                    await self._publish(record)
            except ErasedError:
                log.info("record %s is dropped: its user was erased since", path.name)
                self._spool.remove(path)
                continue
            except CodecError as error:
                # It will never be accepted, and must not block the records behind it.
                self._spool.set_aside(path, error)
                continue
            except (PenstockError, OSError, TimeoutError) as error:
                log.debug("%d records moved to the log, then: %r", num_drained, error)
                return
            # After the log has it: a crash in between publishes it again, which changes nothing.
            self._spool.remove(path)
            num_drained += 1
        if num_drained:
            log.info("%d records moved from the disk spool to the log", num_drained)
        # Other gateways share the folder, so this gateway's own count may be off.
        self._spool.count()

    async def _publish(self, record: Message) -> None:
        if isinstance(record, InferenceRecorded):
            # Consent may have been withdrawn while the request was answered, or the record waited.
            record = self._terms.permitted(record)
        if isinstance(record, InferenceRecorded):
            record = await resealed(record, self._vault)
        if not isinstance(record, Event):
            raise CodecError(f"expected an event, got {type(record).__name__}")
        await self._ctx.publish(record)
