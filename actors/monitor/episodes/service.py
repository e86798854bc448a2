"""`monitor.episodes` and `monitor.episode`: rows and whole episodes for the page."""

import asyncio
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

NUM_READ_TOGETHER = 2
READ_S = 20.0
"""Longest time to read an episode."""


class EpisodeService:
    """Answers from an index that follows the log, and from log and store."""

    def __init__(self, index: EpisodeIndex, ctx: Context) -> None:
        self._index = index
        self._reader = EpisodeReader(ctx.store, ctx.last)
        self._reading = asyncio.Semaphore(NUM_READ_TOGETHER)

    async def list(self, message: Message) -> AsyncIterator[Message]:
        """Send the rows that a filter keeps."""
        assert isinstance(message, ListEpisodes)
        for part in _parts(self._index.select(message.wanted)):
            yield part

    async def read(self, message: Message) -> AsyncIterator[Message]:
        """Send one episode."""
        assert isinstance(message, ReadEpisode)
        try:
            async with asyncio.timeout(READ_S), self._reading:
                episode = await self._reader.read(message.rollout_id, self._index)
        except (TimeoutError, PenstockError) as error:
            yield to_remote(error)
            return
        for part in _parts(episode):
            yield part


def _parts(value: Any) -> list[EpisodePart]:
    data = msgspec.json.encode(value)
    cuts = range(0, len(data), PART_BYTES_MAX)
    return [EpisodePart(data=data[start : start + PART_BYTES_MAX]) for start in cuts]
