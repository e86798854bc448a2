"""One operating-system process that runs some actors: what `penstock actor ROLE ...` does."""

import argparse
import asyncio
import os
import signal
import sys
import traceback
from collections.abc import Sequence

from penstock.actors.runtime.host import ActorHost
from penstock.infra.run.config import RunConfig
from penstock.infra.run.config_file import load_config
from penstock.infra.run.roles import Assembly, build_actors
from penstock.infra.run.runs import RunDir, connect, find_run
from penstock.messages.errors import PenstockError


async def run_actors(run: RunDir, config: RunConfig, specs: Sequence[str], url: str) -> None:
    """Run the actors of `specs` (`role` or `role:region`) until SIGTERM, or until one fails.

    Raises:
        PenstockError: The first actor's failure; the others are stopped in order first.

    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with connect(run, url, "+".join(specs)) as bus:
        store = run.store()
        assembly = Assembly(run=run, config=config, bus=bus, store=store)
        actors = [named for spec in specs for named in await build_actors(spec, assembly)]
        async with asyncio.TaskGroup() as group:
            for name, actor in actors:
                host = ActorHost(actor, bus, store, name=name, seed=config.run.seed)
                group.create_task(host.run(stop), name=name)


def actor_command(arguments: argparse.Namespace) -> int:
    """Run the actors to their end; 0 after an orderly stop, 1 after a failure (on stderr).

    After a failure the process exits at once: a worker thread that hangs must not keep it alive.

    Raises:
        PenstockError: The run is not up, and no server is named.

    """
    import uvloop

    run = find_run(arguments.run, arguments.runs_dir)
    config = load_config(run.config)
    state = run.read_state()
    url = arguments.nats or config.bus.url or (state.place(arguments.roles).url if state else "")
    if not url:
        raise PenstockError(f"run {run.run_id} is not up; name its server with --nats URL")
    try:
        uvloop.run(run_actors(run, config, arguments.roles, url))
    except* Exception as failures:
        for error in failures.exceptions:
            traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(1)
    return 0
