"""`penstock experiment [RUN]`: the candidate, its gates and arms, and the missing evidence."""

import argparse
import time

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.actors.gatekeeper.experiment import fixed_horizon_sessions
from penstock.actors.gatekeeper.fold import GateFold
from penstock.envs.tasks.storage import load_tasks
from penstock.infra.config.file import load_config
from penstock.infra.config.settings import RunConfig
from penstock.infra.output import print_result, printable_struct
from penstock.infra.run.hosts import reached_run
from penstock.infra.run.runs import open_log
from penstock.messages.bus import Bus, ObjectStore
from penstock.messages.errors import NotFoundError
from penstock.messages.gates import Arm, ExperimentDecided, ExperimentView, GateState
from penstock.messages.task import Split

DAY_S = 86400.0
STYLES = {
    GateState.PASSED: "green",
    GateState.WAITING: "yellow",
    GateState.FAILED: "red",
    GateState.REJECTED: "bold red",
}


class ExperimentReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the command."""

    channels: dict[str, int]
    candidate: ExperimentView | None
    """Newest candidate, if any."""
    effect: float
    """Effect for which the missing sessions are computed."""
    fixed_sessions: float
    """Sessions per arm of a fixed-horizon test, at the stable arm's reward so far, or 0.5."""
    decided: list[ExperimentDecided]


async def experiment_command(arguments: argparse.Namespace) -> int:
    """Print the report."""
    run = await reached_run(arguments)
    async with open_log(run, "experiment") as bus:
        # A service may have other gates than the run that trained its first version.
        config = load_config(run.service if run.service.exists() else run.config)
        report = printable_struct(await read_experiment(bus, run.store(), config, arguments.effect))
    if arguments.json:
        print_result(report, as_json=True)
    else:
        Console(markup=False).print(render(report))
    return 0


async def read_experiment(
    bus: Bus, store: ObjectStore, config: RunConfig, effect: float | None
) -> ExperimentReport:
    """Read the experiment from a run's log, as its gatekeeper does."""
    fold = GateFold(config.gatekeeper, config.evaluator.judge)
    decided: list[ExperimentDecided] = []
    async for delivery in bus.follow(fold.types, stop_at_end=True):
        fold.apply(delivery.event)
        if isinstance(delivery.event, ExperimentDecided):
            decided.append(delivery.event)
    effect = effect or config.gatekeeper.test.effect
    view = fold.view(await _num_tasks(store, config))
    rate = 0.5
    if view is not None:
        missing, seconds = fold.experiment.missing(effect)
        view = msgspec.structs.replace(view, num_sessions_missing=missing, seconds_missing=seconds)
        rated = (arm for arm in view.arms if arm.arm is Arm.STABLE and arm.num_sessions)
        rate = next((arm.reward_mean for arm in rated), rate)
    return ExperimentReport(
        channels=fold.candidates.channels,
        candidate=view,
        effect=effect,
        fixed_sessions=round(fixed_horizon_sessions(min(0.99, max(0.01, rate)), effect)),
        decided=decided,
    )


async def _num_tasks(store: ObjectStore, config: RunConfig) -> int:
    wanted = config.gatekeeper.offline.num_tasks
    try:
        return min(wanted, len(await load_tasks(store, Split.HELDOUT))) if wanted else 0
    except NotFoundError:
        return 0


def render(report: ExperimentReport) -> RenderableType:
    """Format the report for a terminal."""
    view = report.candidate
    parts = [render_candidate(report.channels, view)]
    if view is not None:
        parts.append(Text(_test(view, report)))
    if report.decided:
        parts.append(_history(report.decided))
    return Group(*parts)


def render_candidate(channels: dict[str, int], view: ExperimentView | None) -> RenderableType:
    """Format the channels, and the candidate with its arms and gates."""
    pairs = ", ".join(f"{name} version {v}" for name, v in sorted(channels.items()))
    parts: list[RenderableType] = [Text(f"channels: {pairs or 'never moved'}")]
    if view is None:
        parts.append(Text("no version has been a candidate yet"))
    else:
        parts += [Text(_headline(view)), _arms(view), _gates(view)]
    return Group(*parts)


def _headline(view: ExperimentView) -> str:
    phase = {"offline": "before users", "arms": "users are divided"}.get(view.phase, view.phase)
    blocked = f"; blocked by {view.blocked_by}" if view.blocked_by else ""
    return (
        f"candidate {view.number}: version {view.policy_version} against {view.stable_version}, "
        f"{phase}{blocked}"
    )


def _arms(view: ExperimentView) -> Table:
    table = Table(
        "arm", "version", "users", "sessions", "reward", "IPS", "SNIPS", "doubly robust", box=None
    )
    for arm in view.arms:
        values = (arm.reward_mean, arm.ips, arm.snips, arm.doubly_robust)
        counts = (arm.policy_version, arm.num_users, arm.num_sessions)
        table.add_row(arm.arm, *map(str, counts), *(f"{value:.4f}" for value in values))
    return table


def _test(view: ExperimentView, report: ExperimentReport) -> str:
    words = (
        f"difference {view.difference:+.4f}, at any time within "
        f"[{view.difference_low:+.4f}, {view.difference_high:+.4f}]; e-values: better "
        f"{view.evidence_better:.3g}, worse {view.evidence_worse:.3g}\n"
        f"an effect of {report.effect:g} needs {view.num_sessions_missing:,} more rated sessions "
        f"per arm (a test that looks once needs {report.fixed_sessions:,.0f} per arm)"
    )
    if view.seconds_missing >= 0:
        return f"{words}: {view.seconds_missing / DAY_S:,.1f} days at the traffic so far"
    return f"{words}; there is no traffic yet"


def _gates(view: ExperimentView) -> Table:
    table = Table("gate", "state", "stable", "candidate", "", box=None)
    for gate in view.gates:
        table.add_row(
            gate.name,
            Text(gate.state, STYLES[gate.state]),
            f"{gate.baseline:.3g}",
            f"{gate.value:.3g}",
            gate.words,
        )
    return table


def _history(decided: list[ExperimentDecided]) -> Table:
    table = Table("decided", "version", "against", "", "reason", box=None)
    for one in decided[-10:]:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.at))
        versions = (str(one.policy_version), str(one.stable_version))
        table.add_row(at, *versions, one.decision, one.reason)
    return table
