"""How much of a version is on its way at once."""

import asyncio

import pytest

from penstock.actors.runtime.clock import run_virtual
from penstock.actors.sync_relay.transfer import (
    NUM_TRANSFERS_MAX,
    NUM_TRANSFERS_MIN,
    WINDOW_BYTES,
    bounded,
)

MIB = 1 << 20


class Link:
    """Takes a second for everything; remembers what was on its way together."""

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
        results = await bounded(work, sizes if known else None)
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
            await bounded([link.move(0, 1), fail(), link.move(2, 1)], [1, 1, 1])
        await asyncio.sleep(5.0)
        assert not link.together

    run_virtual(main())
