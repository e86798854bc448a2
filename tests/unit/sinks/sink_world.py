"""A small run's log, and a sink that stops in the middle of it."""

from pathlib import Path
from unittest.mock import patch

import pytest
from tests.support.memory_bus.bus import MemoryBus
from tests.support.memory_bus.server import MemoryServer
from tests.unit.monitor.story import finished, step, story

from penstock.actors.runtime.clock import SystemClock
from penstock.infra.sinks import command
from penstock.infra.sinks.rows import ROW_TYPES, Row, row_of
from penstock.infra.sinks.sink import Sink, SinkSettings, open_sink
from penstock.infra.stores.memory import MemoryStore


async def run_log() -> MemoryBus:
    """Return the log of the story and of twenty more steps."""
    server = MemoryServer(seed=0, clock=SystemClock())
    bus = MemoryBus(server, run_id="r1", store=MemoryStore(), name="test")
    steps = [event for number in range(3, 23) for event in step(number, live=[])]
    await bus.publish([*story(), *steps, finished()])
    return bus


async def rows_of(bus: MemoryBus) -> list[Row]:
    """Return what every sink must hold."""
    deliveries = [each async for each in bus.follow(ROW_TYPES, stop_at_end=True)]
    return [row for each in deliveries if (row := row_of(each)) is not None]


def opened(name: str, folder: Path, endpoint: str = "") -> Sink:
    """Open a sink in a folder, or skip where its library is not installed."""
    needed = {"tensorboard": "tensorboard", "wandb": "wandb", "otel": "opentelemetry.proto"}
    pytest.importorskip(needed[name], reason=f"needs the extra: pip install -e '.[{name}]'")
    folder.mkdir(exist_ok=True)
    return open_sink(name, SinkSettings(run_id="r1", folder=folder, endpoint=endpoint))


class KilledError(Exception):
    """Stands for kill -9: nothing after it runs."""


async def killed_after(bus: MemoryBus, sink: Sink, num_writes: int) -> None:
    """Let a sink write some batches, and die before the next one's end is recorded."""
    write, count = sink.write, 0

    async def dying(rows, spans, after):
        nonlocal count
        count += 1
        if count > num_writes:
            with patch("penstock.infra.sinks.sink.write_atomic", side_effect=KilledError()):
                await write(rows, spans, after)
            raise KilledError  # A sink without a cursor.
        await write(rows, spans, after)

    small = patch.object(command, "BATCH", 4)
    with small, patch.object(sink, "write", dying), pytest.raises(KilledError):
        await command.drain(bus, sink)
    await sink.close()  # As the kernel closes its files; no sink records a batch here.
