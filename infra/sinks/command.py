"""`penstock sink NAME [RUN]`: copy a run's metrics to where people look, live or afterwards.

From the log to a sink: batch by batch, behind the run.
"""

import argparse
import asyncio
import fcntl

from penstock.actors.runtime.files import open_private, private_folder
from penstock.infra.output import print_line
from penstock.infra.run.hosts import reached_run
from penstock.infra.run.liveness import has_launcher
from penstock.infra.run.runs import RunDir, open_log
from penstock.infra.sinks.rows import ROW_TYPES, Row, row_of
from penstock.infra.sinks.sink import Sink, SinkSettings, open_sink
from penstock.infra.sinks.traces import TraceSpan, spans_of
from penstock.messages.bus import Bus
from penstock.messages.errors import BusError, ConfigError
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


async def sink_command(arguments: argparse.Namespace) -> int:
    """Follow a run until it is down; a second start goes on where the first one ended.

    Raises:
        ConfigError: The library is not installed, a setting is wrong, or another sink is at work.

    """
    if arguments.endpoint and arguments.name != "otel":
        raise ConfigError(f"--endpoint: of the sink otel, not of {arguments.name}")
    run = await reached_run(arguments)
    folder = arguments.output or run.path / "sinks" / arguments.name
    private_folder(folder)
    with open_private(folder / "lock", "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{folder}: another sink writes there") from error
        settings = SinkSettings(
            run_id=run.run_id,
            folder=folder,
            endpoint=arguments.endpoint,
            allow_plain_text=arguments.allow_plain_text,
        )
        sink = open_sink(arguments.name, settings)
        try:
            count = await follow_run(run, sink)
        finally:
            await sink.close()
    print_line(f"{count} events of run {run.run_id} -> {folder}")
    return 0
