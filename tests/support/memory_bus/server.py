"""What the in-memory buses of one simulation share: streams, services, faults, and the dice."""

import asyncio
import itertools
import random
from collections import defaultdict
from collections.abc import Callable

import msgspec
from tests.support.memory_bus.log import MemoryLog, Stored
from tests.support.memory_bus.work import MemoryDurable

from penstock.actors.runtime.clock import Clock
from penstock.messages.base import Stream
from penstock.messages.errors import BusError

AWAY_S_MAX = 60.0


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Probabilities, each of one event of its kind. All zero: a perfect network."""

    lose_receipt: float = 0.0
    """A publish is stored, its ack lost: the publisher sends it again."""
    lose_delivery: float = 0.0
    """Shared work is delivered to nobody, and again after the ack wait."""
    duplicate_delivery: float = 0.0
    """Shared work is delivered, and then again though it is in hand."""
    reorder_delivery: float = 0.0
    """Shared work that came later is delivered first."""
    lose_ack: float = 0.0
    """A settlement never arrives."""
    lose_request: float = 0.0
    lose_reply: float = 0.0
    latency_s_max: float = 0.0
    """Maximum latency of each step over the network, drawn uniformly."""


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """One server of a service."""

    answer: Callable[[bytes, asyncio.Queue[bytes | None]], None]
    """Starts the handler on an encoded request; it puts encoded replies, then None."""
    is_shared: bool


class MemoryServer:
    """The simulated nats-server. Kept while processes of the simulation crash and return."""

    def __init__(self, *, seed: int, clock: Clock, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.rng = random.Random(seed)
        self.clock = clock
        self.logs = {stream: MemoryLog(stream) for stream in Stream}
        self.services: defaultdict[str, list[Served]] = defaultdict(list)
        self.ids = itertools.count()
        self.durables: dict[str, MemoryDurable] = {}
        self._waiters: dict[asyncio.Future[None], None] = {}
        self._is_up = asyncio.Event()
        self._is_up.set()

    def happens(self, probability: float) -> bool:
        """Throw the dice."""
        return self.rng.random() < probability

    async def travel(self) -> None:
        """Take the time of one step over the network; wait while the server is down.

        Raises:
            BusError: It was down for too long.

        """
        await asyncio.sleep(self.rng.random() * self.faults.latency_s_max)
        try:
            async with asyncio.timeout(AWAY_S_MAX):
                await self._is_up.wait()
        except TimeoutError as error:
            raise BusError(f"no server for {AWAY_S_MAX} s") from error

    def notify(self) -> None:
        """Wake all that wait for a change."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def changed(self, until: float | None = None) -> None:
        """Wait for `notify`, at most until the clock's `until`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        timeout = None if until is None else max(0.0, until - self.clock.now())
        await asyncio.wait([waiter], timeout=timeout)
        self._waiters.pop(waiter, None)

    def kill(self) -> None:
        """Lose what a killed server loses; nothing is answered until `restart`."""
        self._is_up.clear()
        for log in self.logs.values():
            log.restart()

    def restart(self) -> None:
        """Come back."""
        self._is_up.set()
        self.notify()

    def dump(self) -> list[Stored]:
        """Return every stored message, stream by stream: what two equal runs have in common."""
        return [message for log in self.logs.values() for message in log.messages()]
