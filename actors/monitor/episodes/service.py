"""The services `monitor.episodes` and `monitor.episode`, which the page reads episodes from."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from penstock.actors.monitor.episodes.index import EpisodeIndex
from penstock.actors.monitor.episodes.reading import EpisodeReader
from penstock.actors.runtime.context import Context
from penstock.messages.base import Message
from penstock.messages.errors import PenstockError
from penstock.messages.requests.episodes import (
    PART_BYTES_MAX,
    EpisodePart,
    ListEpisodes,
    ReadEpisode,
)
from penstock.messages.rpc import to_remote

log = logging.getLogger(__name__)

NUM_READ_TOGETHER = 2
"""Number of episodes read at once, so that readers do not slow down the monitor."""
READ_S = 20.0
"""Longest time to read an episode, in seconds, including the wait for its turn."""


class EpisodeService:
    """Server of episodes, from an index that follows the log, and from the log and the store."""

    def __init__(self, index: EpisodeIndex, ctx: Context) -> None:
        self._index = index
        self._reader = EpisodeReader(ctx.store, ctx.last)
        self._reading = asyncio.Semaphore(NUM_READ_TOGETHER)

    async def list(self, message: Message) -> AsyncIterator[Message]:
        """Send the rows that match a filter."""
        assert isinstance(message, ListEpisodes)
        for part in _parts(self._index.select(message.wanted)):
            yield part

    async def read(self, message: Message) -> AsyncIterator[Message]:
        """Send one episode, or the error that prevents it."""
        assert isinstance(message, ReadEpisode)
        try:
            async with asyncio.timeout(READ_S), self._reading:
                episode = await self._reader.read(message.rollout_id, self._index)
        except (TimeoutError, PenstockError) as error:
            log.warning("cannot read episode %s: %r", message.rollout_id, error)
            yield to_remote(error)
            return
        for part in _parts(episode):
            yield part


def _parts(value: Any) -> list[EpisodePart]:
    # A long episode exceeds the largest message that the bus carries.
    data = msgspec.json.encode(value)
    cuts = range(0, len(data), PART_BYTES_MAX)
    return [EpisodePart(data=data[start : start + PART_BYTES_MAX]) for start in cuts]
