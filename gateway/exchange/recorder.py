"""Puts replies on the log, or on disk until the log takes them: no reply goes out unrecorded."""

import asyncio
import logging
from pathlib import Path

from penstock.actors.runtime.context import Context
from penstock.actors.runtime.vault import Vault
from penstock.gateway.config import GatewayConfig
from penstock.gateway.errors import ApiError
from penstock.gateway.exchange.spool import Spool
from penstock.gateway.record import Answered, record_of, record_offline, resealed
from penstock.messages.base import Event, Message
from penstock.messages.errors import CodecError, PenstockError
from penstock.messages.feedback import InferenceRecorded

DRAIN_S = 1.0
log = logging.getLogger(__name__)


class Recorder:
    """The one writer of records; while some wait on disk, further ones join them there."""

    def __init__(self, ctx: Context, config: GatewayConfig, vault: Vault, folder: Path) -> None:
        """Find what an earlier process left.

        Args:
            ctx: The gateway's.
            config: Bounds of the wait and of the disk.
            vault: Seals what is stored.
            folder: Of the records that wait.

        """
        self._ctx = ctx
        self._record_s_max = config.record_s_max
        self._vault = vault
        self._spool = Spool(folder, config.spool_bytes_max)

    @property
    def is_full(self) -> bool:
        """Whether no further request should be taken on."""
        return self._spool.is_full

    async def record(self, answered: Answered) -> None:
        """Store one reply.

        Raises:
            ApiError: 503, neither the log nor the disk takes it.

        """
        if self._spool.is_empty:
            try:
                async with asyncio.timeout(self._record_s_max):
                    await self._publish(await record_of(answered, self._vault))
            except (PenstockError, OSError, TimeoutError) as error:
                log.warning("%s waits on disk for the log: %r", answered.request_id, error)
            else:
                return
        record = record_offline(answered, self._vault)
        try:
            await asyncio.to_thread(self._spool.put, answered.request_id, record)
        except (PenstockError, OSError) as error:
            text = f"neither the log nor the disk takes the record of this reply: {error}"
            raise ApiError(503, "not_recorded", text, retry_after_s=5.0) from error

    async def drain(self) -> None:
        """Bring what waits on disk to the log, for as long as the gateway is up."""
        while True:
            await self._ctx.sleep(DRAIN_S)
            if not self._spool.is_empty:
                await self._drain_once()

    async def _drain_once(self) -> None:
        """Publish what waits, oldest first, until the log refuses one."""
        for path, record in self._spool.waiting():
            try:
                async with asyncio.timeout(self._record_s_max):
                    await self._publish(record)
            except CodecError as error:
                self._spool.set_aside(path, error)
                continue
            except (PenstockError, OSError, TimeoutError):
                return
            self._spool.remove(path)
        self._spool.count()

    async def _publish(self, record: Message) -> None:
        if isinstance(record, InferenceRecorded):
            record = await resealed(record, self._vault)
        if not isinstance(record, Event):
            raise CodecError(f"expected an event, got {type(record).__name__}")
        await self._ctx.publish(record)
