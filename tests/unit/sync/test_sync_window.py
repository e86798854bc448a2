"""How much of a version is in flight at once."""

import asyncio
import inspect

import numpy as np
import pytest
from tests.support.virtual_clock import run_virtual

from penstock.actors.relay.core.flat_snapshot import cut
from penstock.actors.relay.core.store_io import (
    NUM_TRANSFERS_MAX,
    NUM_TRANSFERS_MIN,
    WINDOW_BYTES,
    StoreIO,
    gather_bounded,
)
from penstock.actors.relay.publish.publisher import Publisher
from penstock.actors.relay.publish.rank_committer import Committer
from penstock.actors.relay.publish.spans import cut_spans
from penstock.infra.stores.memory import MemoryStore
from penstock.kernels.element_types import TensorSpec
from penstock.messages.errors import DeadlineError

MIB = 1 << 20


class Link:
    """Takes a second for everything; remembers what was in flight together."""

    def __init__(self):
        self.sizes: list[int] = []
        self.together: list[tuple[int, int]] = []

    async def move(self, number, num_bytes):
        self.sizes.append(num_bytes)
        await asyncio.sleep(1.0)
        self.together.append((len(self.sizes), sum(self.sizes)))
        self.sizes.remove(num_bytes)
        return number


def moved(sizes, *, known=True):
    """Move objects of these sizes; return the link and how many seconds it took."""

    async def main():
        link = Link()
        work = (link.move(number, size) for number, size in enumerate(sizes))
        results = await gather_bounded(work, sizes if known else None)
        assert results == list(range(len(sizes)))
        return link, asyncio.get_running_loop().time()

    return run_virtual(main())


def test_small_objects_fill_a_long_link_and_large_ones_stay_within_memory():
    link, took_s = moved([25 * MIB] * 400)
    assert max(num_bytes for _, num_bytes in link.together) <= WINDOW_BYTES
    assert max(count for count, _ in link.together) == WINDOW_BYTES // (25 * MIB) == 40
    assert took_s == 10.0
    assert moved([4096] * 2 * NUM_TRANSFERS_MAX)[1] == 2.0


def test_of_large_objects_and_of_unknown_ones_eight_go_at_once():
    for sizes, known in (([WINDOW_BYTES] * 24, True), ([1] * 24, False)):
        link, took_s = moved(sizes, known=known)
        assert max(count for count, _ in link.together) == NUM_TRANSFERS_MIN == 8
        assert took_s == 3.0


def test_the_first_failure_ends_the_others():
    async def main():
        link = Link()

        async def fail():
            await asyncio.sleep(0.5)
            raise ConnectionResetError("gone")

        with pytest.raises(ConnectionResetError):
            await gather_bounded([link.move(0, 1), fail(), link.move(2, 1)], [1, 1, 1])
        await asyncio.sleep(5.0)
        assert not link.together

    run_virtual(main())


@pytest.mark.filterwarnings("error")
def test_after_a_failure_nothing_is_left_that_was_never_awaited():
    async def main():
        link = Link()

        async def fail():
            await asyncio.sleep(0.5)
            raise ConnectionResetError("gone")

        waiting = [link.move(number, 1) for number in range(3 * NUM_TRANSFERS_MIN)]
        with pytest.raises(ConnectionResetError):
            await gather_bounded([fail(), *waiting])
        assert not any(inspect.getcoroutinestate(piece) == "CORO_CREATED" for piece in waiting)

    run_virtual(main())


class SlowStore(MemoryStore):
    """Takes a while for everything; remembers how much went on at once."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0

    async def put(self, key, data):
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(1.0)
        self.now -= 1
        await super().put(key, data)

    async def keys(self, prefix):
        await asyncio.sleep(5.0)
        return await super().keys(prefix)


async def _in_place(function, *args):
    return function(*args)


def test_a_publisher_uploads_as_many_small_shards_at_once_as_the_window_takes():
    async def main():
        store = SlowStore()
        publisher = Publisher(
            StoreIO(store, offload=_in_place), cut_shards=lambda table: cut(table, 10)
        )
        snapshot = {"a": np.arange(1000, dtype=np.uint16)}
        await publisher.prepare(0, snapshot, optimizer_step=0, config_json="{}")
        assert store.most == NUM_TRANSFERS_MAX

    run_virtual(main())


def test_a_committer_waits_no_longer_than_it_was_told_however_slow_the_store():
    async def main():
        table = (TensorSpec("a", "BF16", (4,)),)
        committer = Committer(
            StoreIO(SlowStore(), offload=_in_place), 1, table, cut_spans(table, 1)
        )
        await committer.begin()
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineError, match="1 of 1 ranks"):
            await committer.commit(0, optimizer_step=0, wait_s=20.0)
        assert asyncio.get_running_loop().time() - began_s <= 20.0 + 2 * 5.0 + 0.1

    run_virtual(main())
