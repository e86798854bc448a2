"""`penstock sink NAME [RUN]`: copy a run's metrics to where people look, live or afterwards."""

import argparse
import fcntl

from penstock.actors.runtime.files import open_private, private_folder
from penstock.infra.run.hosts import reached_run
from penstock.infra.sinks.pump import follow_run
from penstock.infra.sinks.sink import SinkSettings, open_sink
from penstock.messages.errors import ConfigError


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
        settings = SinkSettings(run_id=run.run_id, folder=folder, endpoint=arguments.endpoint)
        sink = open_sink(arguments.name, settings)
        try:
            count = await follow_run(run, sink)
        finally:
            await sink.close()
    print(f"{count} events of run {run.run_id} -> {folder}")
    return 0
