"""Counting many machines, over the backend that needs no image."""

import pytest
from tests.lab.bench import sandbox

from penstock.envs.backends import open_backend
from penstock.envs.sandbox import BackendUnavailable

pytestmark = pytest.mark.vm


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setitem(sandbox.NUM_LIVE, "process", 3)
    try:
        return open_backend("process", allow_process=True)
    except BackendUnavailable as missing:
        pytest.skip(str(missing))


async def test_machines_are_counted_and_leave_nothing(backend):
    figures = await sandbox.bench_live(backend)
    assert figures["live_max"] == 3
    assert figures["left_behind"] == 0
    assert 0 < figures["pss_mib"] <= figures["pss_mib_max"]


async def test_a_host_short_of_memory_holds_fewer(backend, monkeypatch):
    monkeypatch.setattr(sandbox, "RESERVE_MIB", 1 << 40)
    figures = await sandbox.bench_live(backend)
    assert 1 <= figures["live_max"] <= sandbox.AT_ONCE


async def test_a_process_that_stays_is_counted(backend, monkeypatch):
    monkeypatch.setattr(sandbox, "GONE_WITHIN_S", 0.0)
    machine = await backend.start()
    alive = sandbox._identified(machine.process.pid)
    assert await sandbox._left_behind(alive) == len(alive)
    await machine.close()
