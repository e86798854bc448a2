"""The in-memory bus passes `check_bus`, on the simulation's clock, over several seeds."""

import asyncio

import pytest
from tests.contract.bus.bus_world import saved, step
from tests.contract.bus.check_bus import CHECKS
from tests.support.memory_bus.bus import MemoryBus
from tests.support.memory_bus.log import MemoryLog, Stored
from tests.support.memory_bus.server import Faults, MemoryServer
from tests.support.virtual_clock import VirtualClock, run_virtual

from penstock.infra.stores.memory import MemoryStore
from penstock.messages.base import Stream
from penstock.messages.training import CheckpointSaved

SLOW = Faults(latency_s_max=0.002)


class MemoryWorld:
    def __init__(self, seed: int, faults: Faults) -> None:
        self.server = MemoryServer(seed=seed, clock=VirtualClock(), faults=faults)
        self.store = MemoryStore()

    async def bus(self, name: str = "tester") -> MemoryBus:
        return MemoryBus(self.server, run_id="r1", store=self.store, name=name)

    async def inject(self, stream: Stream, suffix: str, data: bytes) -> None:
        message = Stored(
            sequence=0,
            subject=f"ps.r1.{stream}.{suffix}",
            data=data,
            is_claim=False,
            stored_at=self.server.clock.now(),
            publish_id="injected",
        )
        self.server.logs[stream].store(message)
        self.server.notify()

    async def restart_server(self) -> None:
        self.server.kill()
        await asyncio.sleep(0.2)
        self.server.restart()


@pytest.mark.parametrize("faults", [Faults(), SLOW], ids=["instant", "slow"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conforms(check, faults):
    for seed in range(3):

        async def main(seed: int = seed) -> None:
            await check(MemoryWorld(seed, faults))

        run_virtual(main())


def test_a_follower_looks_once_at_what_is_not_for_it(monkeypatch):
    looked: list[int] = []
    get = MemoryLog.get

    def noted(log: MemoryLog, sequence: int) -> Stored | None:
        looked.append(sequence)
        return get(log, sequence)

    async def main() -> None:
        world = MemoryWorld(0, Faults())
        bus = await world.bus()
        found = bus.follow([CheckpointSaved])
        waiting = asyncio.ensure_future(anext(found))
        for number in range(100):
            await bus.publish([step(number)])
            await asyncio.sleep(0)
        await bus.publish([saved(1)])
        assert (await waiting).event == saved(1)
        await found.aclose()

    monkeypatch.setattr(MemoryLog, "get", noted)
    run_virtual(main())
    assert max(looked) == 101 and len(looked) < 300, "not all of them again at each new one"
