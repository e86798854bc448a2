"""`penstock evals [RUN]`: pass@k of each evaluated version, and two versions task by task."""

import argparse
from collections import defaultdict
from collections.abc import Mapping

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table

from penstock.actors.evaluator.estimates import Counts, compare, estimates_by_k
from penstock.actors.evaluator.evaluation import counted_verdicts
from penstock.infra.config.file import load_config
from penstock.infra.output import print_result, printable_struct
from penstock.infra.run.hosts import reached_run
from penstock.infra.run.runs import open_log
from penstock.messages.bus import Bus
from penstock.messages.errors import ConfigError
from penstock.messages.reward import Estimate, EvalAnnounced, Outcome, Verdict, VersionComparison
from penstock.messages.rollout import RolloutFinished
from penstock.messages.task import Purpose


class VersionRates(msgspec.Struct, frozen=True, kw_only=True):
    """One version on one set."""

    policy_version: int
    num_attempts: int
    """Attempts that count."""
    num_missing: int
    """Attempts that were masked, came from another version, or have not been judged."""
    pass_at: dict[int, Estimate]
    """By k."""


class SetReport(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation set."""

    eval_set: str
    versions: list[VersionRates]
    """Versions in their order."""
    compared: int = -1
    """Later version of the comparison; -1 without one."""
    comparison: VersionComparison | None = None


class EvalsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the command."""

    sets: list[SetReport]


async def evals_command(arguments: argparse.Namespace) -> int:
    """Print the report."""
    run = await reached_run(arguments)
    async with open_log(run, "evals") as bus:
        judge = load_config(run.config_in_use).evaluator.judge
        report = printable_struct(await read_evals(bus, judge, arguments.versions))
    if arguments.json:
        print_result(report, as_json=True)
    else:
        Console(markup=False).print(render(report))
    return 0


async def read_evals(bus: Bus, judge: str, versions: list[int] | None = None) -> EvalsReport:
    """Read a run's evaluations from its log.

    Args:
        bus: The log.
        judge: Name of the judge whose verdicts count.
        versions: Two versions to compare; None: the first and the last of each set.

    Raises:
        ConfigError: No set was evaluated at both of these versions.

    """
    announced: dict[str, EvalAnnounced] = {}
    verdicts: dict[str, dict[str, Verdict]] = defaultdict(dict)
    tasks: dict[str, str] = {}
    async for delivery in bus.follow((EvalAnnounced, RolloutFinished, Verdict), stop_at_end=True):
        match delivery.event:
            case EvalAnnounced() as event:
                announced.setdefault(event.eval_id, event)
            case RolloutFinished() as event if event.purpose is Purpose.EVAL:
                tasks[event.rollout_id] = event.task_id
            case Verdict() as event if event.purpose is Purpose.EVAL and event.judge == judge:
                # As the evaluator counts: the first verdict stands.
                verdicts[event.group_id].setdefault(event.rollout_id, event)
            case _:
                pass
    by_set: dict[str, dict[int, EvalAnnounced]] = defaultdict(dict)
    for event in announced.values():
        by_set[event.eval_set][event.policy_version] = event
    counts = {name: _counts(event, verdicts[name], tasks) for name, event in announced.items()}
    reports = [_report(name, found, counts, versions) for name, found in sorted(by_set.items())]
    if versions and not any(report.comparison for report in reports):
        expected = "; ".join(
            f"{report.eval_set or 'heldout'}: {', '.join(map(str, by_set[report.eval_set]))}"
            for report in reports
        )
        text = f"expected two versions that were evaluated on one set ({expected or 'none'})"
        raise ConfigError(f"--versions: {text}, got {versions[0]} and {versions[1]}")
    return EvalsReport(sets=reports)


def _counts(
    event: EvalAnnounced, verdicts: Mapping[str, Verdict], tasks: Mapping[str, str]
) -> dict[str, Counts]:
    """Return solved and counted attempts by task id."""
    found: dict[str, Counts] = {}
    for verdict in counted_verdicts(verdicts.values(), event.policy_version):
        task = tasks.get(verdict.rollout_id)
        if task is not None:
            solved, num = found.get(task, (0, 0))
            found[task] = (solved + (verdict.outcome is Outcome.SOLVED), num + 1)
    return found


def _report(
    name: str,
    announced: Mapping[int, EvalAnnounced],
    counts: Mapping[str, Mapping[str, Counts]],
    versions: list[int] | None,
) -> SetReport:
    rates = [_rates(event, counts[event.eval_id]) for _, event in sorted(announced.items())]
    first, last = sorted(versions or (min(announced), max(announced)))
    pair = (first, last) if first != last and {first, last} <= announced.keys() else None
    if pair is None:
        return SetReport(eval_set=name, versions=rates)
    before, after = (counts[announced[version].eval_id] for version in pair)
    comparison = compare(before, after, first)
    return SetReport(eval_set=name, versions=rates, compared=last, comparison=comparison)


def _rates(event: EvalAnnounced, counts: Mapping[str, Counts]) -> VersionRates:
    num = sum(attempts for _, attempts in counts.values())
    return VersionRates(
        policy_version=event.policy_version,
        num_attempts=num,
        num_missing=event.num_attempts - num,
        pass_at=estimates_by_k(list(counts.values()), event.num_samples),
    )


def render(report: EvalsReport) -> RenderableType:
    """Format the report for a terminal."""
    table = Table("set", "version", "attempts", "tasks", "pass@k and its 95% interval", box=None)
    compared = Table("set", "versions", "tasks", "difference", "better", "worse", "p", box=None)
    for one in report.sets:
        name = one.eval_set or "heldout"
        for rates in one.versions:
            words = "  ".join(f"{k}: {_words(found)}" for k, found in rates.pass_at.items())
            missing = f" ({rates.num_missing} missing)" if rates.num_missing else ""
            num = max((found.num_tasks for found in rates.pass_at.values()), default=0)
            attempts = f"{rates.num_attempts}{missing}"
            table.add_row(name, str(rates.policy_version), attempts, str(num), words)
        if (found := one.comparison) is not None:
            compared.add_row(
                name,
                f"{found.policy_version} -> {one.compared}",
                str(found.difference.num_tasks),
                _words(found.difference, sign="+"),
                str(found.num_better),
                str(found.num_worse),
                f"{found.p_value:.2g}",
            )
    return Group(table, compared) if compared.row_count else table


def _words(found: Estimate, sign: str = "") -> str:
    return f"{found.value:{sign}.3f} [{found.low:{sign}.3f}, {found.high:{sign}.3f}]"
