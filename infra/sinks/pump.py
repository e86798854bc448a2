"""From the log to a sink: batch by batch, behind the run."""

import asyncio

from penstock.infra.run.liveness import has_launcher
from penstock.infra.run.runs import RunDir, open_log
from penstock.infra.sinks.rows import ROW_TYPES, Row, row_of
from penstock.infra.sinks.sink import Sink
from penstock.infra.sinks.traces import TraceSpan, spans_of
from penstock.messages.bus import Bus
from penstock.messages.errors import BusError
from penstock.messages.rollout import RolloutFinished

PERIOD_S = 2.0
BATCH = 256
"""Events between two writes."""
_TYPES = (*ROW_TYPES, RolloutFinished)


async def follow_run(run: RunDir, sink: Sink) -> int:
    """Copy a run's log to a sink until the run is down and all is written; return its events.

    Raises:
        BusError: The servers are gone while the run is up: start the sink again.

    """
    count = 0
    if run.access() is not None or run.read_state() is not None:
        try:
            async with open_log(run, "sink") as bus:
                while await has_launcher(run, bus):
                    count += await drain(bus, sink)
                    await asyncio.sleep(PERIOD_S)
        except BusError:
            if run.access() is not None or run.read_state() is not None:
                raise  # Else its own server has ended with the launcher.
    async with open_log(run, "sink") as bus:
        return count + await drain(bus, sink)


async def drain(bus: Bus, sink: Sink) -> int:
    """Write what the log holds by now and the sink has not written; return the number of events."""
    count, after = 0, dict(sink.after)
    rows: list[Row] = []
    spans: list[TraceSpan] = []
    async for delivery in bus.follow(_TYPES, after=after, stop_at_end=True):
        row = row_of(delivery)
        rows += [row] if row else []
        spans += await spans_of(bus, delivery)
        after[delivery.stream] = delivery.sequence
        count += 1
        if count % BATCH == 0:
            await sink.write(rows, spans, dict(after))
            rows, spans = [], []
    if count % BATCH:
        await sink.write(rows, spans, dict(after))
    return count
