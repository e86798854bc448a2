"""Replay: retrains every step of a run from its log and compares every weight digest."""

import platform
import sys
from collections.abc import AsyncIterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.actors.policy.hf.stored import stored_model
from penstock.envs.harness import HARNESS_VERSION
from penstock.infra.config.settings import RunConfig
from penstock.infra.output import write_to
from penstock.infra.ranks.arithmetic import arithmetic_of, replay_refusal
from penstock.infra.run.runs import RunDir, open_vault
from penstock.infra.run.verdict_check import VerdictCheck, recorded_judge
from penstock.messages.base import FORMAT
from penstock.messages.bus import Bus, Delivery
from penstock.messages.control import RunStarted
from penstock.messages.errors import ConfigError
from penstock.messages.reading.trajectories import last_of
from penstock.messages.training import BatchManifest

if TYPE_CHECKING:
    from penstock.actors.trainer.ranks.world import World

_CPU_INFO = Path("/proc/cpuinfo")


async def check_arithmetic(run_id: str, bus: Bus) -> None:
    """Refuse a run whose arithmetic cannot be repeated here.

    Raises:
        ConfigError: It cannot, e.g. because it depends on several processes.

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
    """Replay a run from an open log; return `steps`, `identical`, `speedup` and more.

    Args:
        deliveries: Events of `REPLAY_TYPES`, if the caller reads the log for others as well.
        world: Ranks that replay together; None for one process.

    """
    from penstock.actors.trainer.replay import REPLAY_TYPES, ReplayLog, replay
    from penstock.actors.trainer.step import StepResult

    def say(manifest: BatchManifest, result: StepResult) -> None:
        write_to(
            sys.stderr,
            f"step {manifest.step}: weights {result.weights_digest[:16]}, "
            f"loss {result.metrics['loss']:+.4f}\n",
        )

    # Along the same reading: rewards are checked before the trainer's replay uses them.
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
    outcome: dict[str, Any] = {
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
    tolerated = [span for span in report.spans if not span.is_repeated]
    if tolerated:
        outcome["not_repeated"] = [
            f"steps {span.first} to {span.last}, computed by {span.arithmetic or 'another machine'}"
            for span in tolerated
        ]
    if not outcome["identical"] and (report.first_difference or not tolerated):
        words = report.first_difference or verdicts.first_difference
        outcome["first_difference"] = words or _why_no_step(report.steps_erased)
        outcome["other_versions"] = await _other_versions(bus)
    return outcome


def _why_no_step(steps_erased: int) -> str:
    if not steps_erased:
        return "the log records no step"
    return f"all {steps_erased} steps trained users whose content cannot be read here"


async def _other_versions(bus: Bus) -> dict[str, str]:
    """Return versions that differ between the run and this process, the likeliest cause."""
    started = await bus.last(RunStarted)
    if started is None or not isinstance(started.event, RunStarted):
        return {}
    here, recorded = environment_versions(), started.event.versions
    return {
        name: f"{recorded[name]} then, {value} now"
        for name, value in here.items()
        if name in recorded and recorded[name] != value
    }


def environment_versions() -> dict[str, str]:
    """Return the versions on which a run's bits depend, and the version of the agents' tools."""
    return {
        "penstock": version("penstock"),
        "torch": version("torch"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "harness": HARNESS_VERSION,
    }


def _processor() -> str:
    # By name, because the vector instructions of a CPU decide the order of additions.
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


async def run_started(run_dir: RunDir, config: RunConfig, cached: Sequence[str] = ()) -> RunStarted:
    """Return the first event of a run's log: configuration, environment, cached inputs."""
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
