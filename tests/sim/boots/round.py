"""One round: a fresh fleet, some hundred boots under fire, then nothing may be left."""

import asyncio
import contextlib
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

from penstock.infra.orphans import reap_ended

from .chaos import Chaos, OrphanError
from .episodes import Episodes
from .fleet import IDLE_PER_HOST, Fleet, open_fleet
from .processes import children_of, left_of, machines_of, num_descriptors

REST_S_MAX = 180.0
"""Of a start, and after the last episode: leases end, rooms are given up, pools fill up again."""
REAP_S = 0.5
DESCRIPTORS_SPARE = 4
"""A host may hold so many more than one that has just started: threads, cached connections."""


async def run_round(name: str, num_boots: int) -> tuple[int, Counter[str]]:
    """Return boots, and what was killed and how episodes ended; the name is its seed.

    Raises:
        OrphanError: A process, descriptor, lease, placement or file is left.
        RanTwiceError: An operation ran twice.

    """
    rng = random.Random(name)
    shared = _shared_memory()
    root = Path(tempfile.mkdtemp(prefix="boots-"))
    before = set(children_of(os.getpid()))
    async with open_fleet(root) as fleet:
        reaping = asyncio.create_task(_reap(fleet))
        fresh = await _at_rest(fleet)
        episodes = Episodes(fleet.bus, rng, name)
        chaos = Chaos(fleet, episodes, rng)
        killing = asyncio.create_task(chaos.run())
        working = asyncio.create_task(episodes.run(num_boots))
        await asyncio.wait([killing, working], return_when=asyncio.FIRST_COMPLETED)
        killing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await killing
        await working
        await _check_rest(fleet, fresh)
        reaping.cancel()
    left = await asyncio.to_thread(
        left_of, [p for p in children_of(os.getpid()) if p not in before]
    )
    _none("processes", left)
    _none("files", list((root / "tmp").rglob("*")))
    _none("shared memory", sorted(_shared_memory() - shared))
    shutil.rmtree(root)
    kills = {f"kill {victim}": count for victim, count in chaos.kills.items()}
    return episodes.num_boots, Counter(kills) + episodes.outcomes


async def _reap(fleet: Fleet) -> None:
    """Take killed machines out of the process table: they come to whoever adopts orphans."""
    while True:
        started = {part.process.pid for part in fleet.parts if part.process}
        await asyncio.to_thread(reap_ended, started)
        await asyncio.sleep(REAP_S)


async def _at_rest(fleet: Fleet) -> int:
    """Wait until hosts hold idle machines alone; return the most descriptors that one has open."""
    since = time.time()
    try:
        async with asyncio.timeout(REST_S_MAX):
            for host in fleet.hosts:
                while not _is_at_rest(gauges := await fleet.gauges(host, since)):
                    await asyncio.sleep(0.2)
            while (gauges := await fleet.gauges(fleet.scheduler, since)).get("machines") != 0:
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise OrphanError(f"not at rest, but {gauges}") from None
    return max(num_descriptors(host.pid) for host in fleet.hosts)


def _is_at_rest(gauges: dict[str, float]) -> bool:
    names = ("leased", "waiting", "idle", "live")
    return [gauges.get(name) for name in names] == [0, 0, IDLE_PER_HOST, IDLE_PER_HOST]


async def _check_rest(fleet: Fleet, fresh: int) -> None:
    """See that hosts hold no more than when they were fresh."""
    num_descriptors_now = await _at_rest(fleet)
    if num_descriptors_now > fresh + DESCRIPTORS_SPARE:
        raise OrphanError(f"a host has {num_descriptors_now} descriptors open, fresh {fresh}")
    for host in fleet.hosts:
        if len(machines_of(host.pid)) != IDLE_PER_HOST:
            raise OrphanError(f"{host.spec}: {machines_of(host.pid)} for {IDLE_PER_HOST} machines")


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("*vm_file*")}


def _none(what: str, left: list) -> None:
    if left:
        raise OrphanError(f"{what} left: {left}")
