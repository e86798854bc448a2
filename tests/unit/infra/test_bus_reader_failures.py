"""A reader that fails says so to whoever iterates, whatever the failure: nobody waits for ever."""

import asyncio
from types import SimpleNamespace

import pytest

from penstock.infra.bus.jetstream.log_reader import live
from penstock.infra.bus.jetstream.puller import Puller


class Reader:
    """Yields what it was given, then fails."""

    def __init__(self, error: Exception, *deliveries: str) -> None:
        self._error, self._deliveries = error, deliveries

    async def deliveries(self):
        for delivery in self._deliveries:
            yield delivery
        raise self._error


async def test_a_log_reader_that_fails_ends_the_merge():
    readers = [Reader(OSError("the store is gone"), "a", "b")]
    seen = []
    with pytest.raises(OSError, match="the store is gone"):
        async with asyncio.timeout(5):
            async for delivery in live(readers):
                seen.append(delivery)
    assert seen == ["a", "b"]


async def test_a_pull_that_fails_ends_the_messages():
    async def wait_connected() -> None:
        pass

    async def ensure() -> str:
        raise KeyError("num_pending")

    puller = Puller(SimpleNamespace(wait_connected=wait_connected), "LOG", ensure, num_max=4)
    with pytest.raises(KeyError, match="num_pending"):
        async with asyncio.timeout(5):
            async for _ in puller.messages():
                pass
