"""Processor time of what the actors do not report: the launcher itself, and its nats-server."""

import asyncio
import contextlib
from collections.abc import Callable

from penstock.actors.runtime.processor_time import process_s, processor_s_of
from penstock.messages.bus import Bus
from penstock.messages.errors import BusError, DeadlineError
from penstock.messages.telemetry import ProcessorUsed

RECORD_S = 10.0


async def record_processor(bus: Bus, server_pid: Callable[[], int]) -> None:
    """Keep what the launcher and its server have used, until cancelled.

    Args:
        bus: Of the run.
        server_pid: Process id of the server, another one where it was restarted; 0: not ours.

    """
    before = {name: await _used(bus, name) for name in ("launcher", "nats-server")}
    server_s, last_pid, last_s = 0.0, 0, 0.0
    while True:
        pid = server_pid()
        now_s = processor_s_of(pid)
        server_s += max(0.0, now_s - (last_s if pid == last_pid else 0.0))
        last_pid, last_s = pid, now_s
        used = {"launcher": process_s(with_children=False), "nats-server": server_s}
        events = [
            ProcessorUsed(actor=name, role=name, processor_s={"process": before[name] + used_s})
            for name, used_s in used.items()
        ]
        with contextlib.suppress(BusError, DeadlineError):
            await bus.publish(events)
        await asyncio.sleep(RECORD_S)


async def _used(bus: Bus, name: str) -> float:
    """Return what earlier launchers of the run have recorded."""
    found = await bus.last(ProcessorUsed, name)
    if found is None:
        return 0.0
    assert isinstance(found.event, ProcessorUsed)
    return found.event.processor_s.get("process", 0.0)
