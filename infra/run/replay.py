"""`penstock replay`: retrain every step of a run from its log and compare every digest."""

import argparse
import asyncio
import os
import platform
import sys
from collections.abc import AsyncIterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.actors.policy.hf.stored import stored_model
from penstock.actors.trainer.engines.config import NUM_RANKS_MAX
from penstock.envs.harness import HARNESS_VERSION
from penstock.infra.commands.output import print_result
from penstock.infra.judge.verdict_check import VerdictCheck, recorded_judge
from penstock.infra.ranks.arithmetic import arithmetic_of, replay_refusal
from penstock.infra.run.config import RunConfig
from penstock.infra.run.config_file import load_config
from penstock.infra.run.hosts import reached_run
from penstock.infra.run.runs import RunDir, connect, open_log, open_vault
from penstock.messages.base import FORMAT
from penstock.messages.bus import Bus, Delivery
from penstock.messages.control import RunStarted
from penstock.messages.errors import ConfigError
from penstock.messages.reading.trajectories import last_of
from penstock.messages.training import BatchManifest

if TYPE_CHECKING:
    from penstock.actors.trainer.ranks.world import World

DIFFERENT = 1
"""Exit code of a replay that did not give the recorded bits."""
_CPU_INFO = Path("/proc/cpuinfo")


async def replay_command(arguments: argparse.Namespace) -> int:
    """Replay a run and print the outcome; 0 only if every step is identical.

    Raises:
        NotFoundError: No such run, or it has no checkpoint of version 0.
        ConfigError: Its bits depend on several processes.

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
    if arguments.rank_log is not None:
        await _replay_as_rank(run, config, arguments.rank_log, as_json=arguments.json)
    async with open_log(run, "replay") as bus:
        await check_arithmetic(run.run_id, bus)
        if arguments.ranks > 1:
            return await _replay_by_ranks(run, config, arguments)
        figures = await replay_run(run, config, bus, with_progress=not arguments.json)
    return _told(figures, as_json=arguments.json)


async def _replay_by_ranks(run: RunDir, config: RunConfig, arguments: argparse.Namespace) -> int:
    """Replay in ranks, which read the log where this process has it open."""
    from penstock.infra.ranks.gang import run_gang

    command = ["--runs-dir", str(run.path.parent), "replay", run.run_id]
    command += ["--json"] if arguments.json else []
    url = run.where if isinstance(run.where, str) else ""
    return await run_gang([*command, f"--rank-log={url}"], config.trainer, arguments.ranks)


async def _replay_as_rank(run: RunDir, config: RunConfig, url: str, *, as_json: bool) -> NoReturn:
    """Replay as one of several ranks, of which the first prints; end the process.

    Args:
        run: The run.
        config: Its own.
        url: Of the server that has the log; empty: those that its configuration names.
        as_json: How the figures are printed.

    """
    from penstock.actors.trainer.ranks.world import RankEnvironment, World

    place, trainer = RankEnvironment.of(os.environ), config.trainer
    world = await asyncio.to_thread(World, place, trainer.device, trainer.ranks.step_s_max)
    name, is_first = f"replay-{place.rank}", place.rank == 0
    async with connect(run, url, name) if url else open_log(run, name) as bus:
        with_progress = is_first and not as_json
        figures = await replay_run(run, config, bus, with_progress=with_progress, world=world)
    code = _told(figures, as_json=as_json) if is_first else 0
    sys.stdout.flush()
    await asyncio.to_thread(world.gather, code)  # The others end once the first has printed.
    os._exit(code)  # Torch's process groups may abort at an orderly exit.


def _told(figures: dict[str, Any], *, as_json: bool) -> int:
    """Print the outcome; return the exit code."""
    if as_json:
        print_result(figures, as_json=True)
    else:
        sys.stdout.write(_text(figures) + "\n")
    return 0 if figures["identical"] else DIFFERENT


async def check_arithmetic(run_id: str, bus: Bus) -> None:
    """Refuse a run whose bits depend on several processes.

    Raises:
        ConfigError: They do.

    """
    started = await bus.last(RunStarted)
    event = started.event if started is not None else None
    refusal = replay_refusal(event.arithmetic) if isinstance(event, RunStarted) else ""
    if refusal:
        raise ConfigError(f"run {run_id}: no replay: {refusal}")


async def replay_run(  # noqa: PLR0913
    run: RunDir,
    config: RunConfig,
    bus: Bus,
    deliveries: AsyncIterator[Delivery] | None = None,
    *,
    with_progress: bool = False,
    world: "World | None" = None,
) -> dict[str, Any]:
    """Replay a run over an open log; return `steps`, `identical`, `speedup` and more.

    Args:
        run: the run.
        config: its own.
        bus: its log.
        deliveries: the log's events of `REPLAY_TYPES`, from a reading that serves others as well.
        with_progress: print each step on standard error.
        world: of the ranks that replay it together; None: this process alone.

    """
    from penstock.actors.trainer.replay import REPLAY_TYPES, ReplayLog, replay
    from penstock.actors.trainer.step import StepResult

    def say(manifest: BatchManifest, result: StepResult) -> None:
        sys.stderr.write(
            f"step {manifest.step}: weights {result.weights_digest[:16]}, "
            f"loss {result.metrics['loss']:+.4f}\n"
        )

    verdicts = VerdictCheck(await recorded_judge(bus, config.judge))
    report = await replay(
        ReplayLog(
            deliveries=verdicts.along(deliveries or bus.follow(REPLAY_TYPES, stop_at_end=True)),
            last=last_of(bus),
            store=run.store(),
            opener=open_vault(run),
        ),
        config.policy,
        config.trainer,
        on_step=say if with_progress else None,
        world=world,
    )
    figures: dict[str, Any] = {
        "steps": report.steps,
        "steps_compared": report.steps_compared,
        "steps_erased": report.steps_erased,
        "identical": report.identical and not verdicts.num_different,
        "verdicts_checked": verdicts.num_checked,
        "verdicts_different": verdicts.num_different,
        "speedup": report.speedup,
        "speedup_rl": report.speedup_rl,
        "wall_s": report.wall_s,
        "live_s": report.live_s,
        "live_rl_s": report.live_rl_s,
        "weights_digest": report.weights_digest,
    }
    if not figures["identical"]:
        words = report.first_difference or verdicts.first_difference
        figures["first_difference"] = words or _nothing(report.steps_erased)
        figures["other_versions"] = await _other_versions(bus)
    return figures


def _nothing(steps_erased: int) -> str:
    """Return why there was no step to compare."""
    if not steps_erased:
        return "the log records no step"
    return f"all {steps_erased} steps trained users whose content cannot be read here"


async def _other_versions(bus: Bus) -> dict[str, str]:
    """Return the versions that differ between the run and this process: the likeliest cause."""
    started = await bus.last(RunStarted)
    if started is None or not isinstance(started.event, RunStarted):
        return {}
    here, recorded = environment_versions(), started.event.versions
    return {
        name: f"{recorded[name]} then, {value} now"
        for name, value in here.items()
        if name in recorded and recorded[name] != value
    }


def _text(figures: dict[str, Any]) -> str:
    steps, speedup = figures["steps"], figures["speedup"]
    erased = figures["steps_erased"]
    left_out = f"; {erased} steps with erased users left out" if erased else ""
    if figures["identical"]:
        return (
            f"{steps} steps identical, bit for bit, in {figures['wall_s']:.1f} s, "
            f"{speedup:.1f} times as fast as the run ({figures['speedup_rl']:.1f} times its RL)"
            f"{left_out}"
        )
    lines = [f"{steps} steps replayed; first difference: {figures['first_difference']}"]
    lines += [f"  {name}: {text}" for name, text in figures["other_versions"].items()]
    return "\n".join(lines)


def environment_versions() -> dict[str, str]:
    """Return the versions that decide a run's bits, and the version of the agents' tools."""
    return {
        "penstock": version("penstock"),
        "torch": version("torch"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "harness": HARNESS_VERSION,
    }


def _processor() -> str:
    """Return the processor's name: its vector instructions decide the order of additions."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


async def run_started(run_dir: RunDir, config: RunConfig, cached: Sequence[str] = ()) -> RunStarted:
    """Return the first event of a run's log: configuration, environment, and what was cached."""
    model = await stored_model(run_dir.store())
    return RunStarted(
        run_id=run_dir.run_id,
        seed=config.run.seed,
        config_toml=run_dir.config.read_text(),
        versions=environment_versions(),
        model_digests=model.digests if model else {},
        format=FORMAT,
        arithmetic=arithmetic_of(config),
        cached=tuple(cached),
    )
