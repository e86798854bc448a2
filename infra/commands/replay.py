"""`penstock replay`: replays a run in one process or several ranks, and prints the outcome."""

import argparse
import asyncio
import os
import sys
from typing import Any, NoReturn

from penstock.actors.trainer.engines.config import NUM_RANKS_MAX
from penstock.infra.config.file import load_config
from penstock.infra.config.settings import RunConfig
from penstock.infra.output import print_result, write_to
from penstock.infra.run.hosts import reached_run
from penstock.infra.run.replay import check_arithmetic, replay_run
from penstock.infra.run.runs import RunDir, connect, open_log
from penstock.messages.errors import ConfigError

DIFFERENT = 1
"""Exit code of a replay that differs from the log."""


async def replay_command(arguments: argparse.Namespace) -> int:
    """Replay a run and print the outcome; 0 only if every step is identical.

    Raises:
        NotFoundError: The run does not exist, or has no checkpoint of version 0.
        ConfigError: The run's arithmetic cannot be repeated here.

    """
    if arguments.what_if:
        from penstock.infra.what_if.command import what_if_command

        if arguments.ranks > 1:
            raise ConfigError("--ranks: expected 1 with --what-if, which one process trains")
        return await what_if_command(arguments)
    if arguments.output is not None or arguments.no_evaluation:
        raise ConfigError("--output, --no-evaluation: expected with them --what-if KEY=VALUE")
    if not 1 <= arguments.ranks <= NUM_RANKS_MAX:
        raise ConfigError(f"--ranks: expected 1 to {NUM_RANKS_MAX}, got {arguments.ranks}")
    run = await reached_run(arguments)
    config = load_config(run.config)
    # This process is one of the ranks that `_replay_by_ranks` started.
    if arguments.rank_log is not None:
        await _replay_as_rank(run, config, arguments.rank_log, as_json=arguments.json)
    if "tinker" in config.processes:
        from penstock.infra.tinker.replay import replay_command as replay_tinker

        return await replay_tinker(run, config, as_json=arguments.json)
    async with open_log(run, "replay") as bus:
        await check_arithmetic(run.run_id, bus)
        if arguments.ranks > 1:
            return await _replay_by_ranks(run, config, arguments)
        outcome = await replay_run(run, config, bus, with_progress=not arguments.json)
    return _print_outcome(outcome, as_json=arguments.json)


async def _replay_by_ranks(run: RunDir, config: RunConfig, arguments: argparse.Namespace) -> int:
    # The ranks read the log from this process's server.
    from penstock.infra.ranks.gang import run_gang

    command = ["--runs-dir", str(run.path.parent), "replay", run.run_id]
    command += ["--json"] if arguments.json else []
    url = run.where if isinstance(run.where, str) else ""
    return await run_gang([*command, f"--rank-log={url}"], config.trainer, arguments.ranks)


async def _replay_as_rank(run: RunDir, config: RunConfig, url: str, *, as_json: bool) -> NoReturn:
    """Replay as one of several ranks, print as the first one, and end the process.

    Args:
        url: Server with the log; empty for the servers in the configuration.

    """
    from penstock.actors.trainer.ranks.world import RankEnvironment, World

    trainer = config.trainer
    place = RankEnvironment.of(os.environ, trainer.ranks.allow_plain_text)
    world = await asyncio.to_thread(World, place, trainer.device, trainer.ranks.step_s_max)
    name, is_first = f"replay-{place.rank}", place.rank == 0
    async with connect(run, url, name) if url else open_log(run, name) as bus:
        with_progress = is_first and not as_json
        outcome = await replay_run(run, config, bus, with_progress=with_progress, world=world)
    code = _print_outcome(outcome, as_json=as_json) if is_first else 0
    sys.stdout.flush()
    await asyncio.to_thread(world.gather, code)  # The other ranks end once the first has printed.
    os._exit(code)  # Torch's process groups may abort at an orderly exit.


def _print_outcome(outcome: dict[str, Any], *, as_json: bool) -> int:
    if as_json:
        print_result(outcome, as_json=True)
    else:
        write_to(sys.stdout, _outcome_text(outcome) + "\n")
    return 0 if outcome["identical"] else DIFFERENT


def _outcome_text(outcome: dict[str, Any]) -> str:
    steps, speedup = outcome["steps"], outcome["speedup"]
    erased = outcome["steps_erased"]
    left_out = f"; {erased} steps with erased users left out" if erased else ""
    if outcome["identical"]:
        return (
            f"{steps} steps identical, bit for bit, in {outcome['wall_s']:.1f} s, "
            f"{speedup:.1f} times as fast as the run ({outcome['speedup_rl']:.1f} times its RL)"
            f"{left_out}"
        )
    difference = outcome.get("first_difference", "")
    lines = [f"{steps} steps replayed{f'; first difference: {difference}' if difference else ''}"]
    lines += [
        f"  not bit for bit, losses within the tolerance: {text}"
        for text in outcome.get("not_repeated", ())
    ]
    lines += [f"  {name}: {text}" for name, text in outcome.get("other_versions", {}).items()]
    return "\n".join(lines)
