"""Closes a run: replay, summary, report and closing table, from one reading of its log."""

import os
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any, TypeGuard

import msgspec

from penstock.actors.monitor.episodes.collecting import EpisodeCollector
from penstock.actors.monitor.fold import RunFold
from penstock.actors.monitor.log_folds import fold_and_yield, fold_log
from penstock.actors.monitor.state import MonitorState, encode_state
from penstock.actors.runtime.files import write_atomic
from penstock.gateway.page.live_page import render_page
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.config.settings import RunConfig
from penstock.infra.ranks.arithmetic import arithmetic_of, replay_refusal
from penstock.infra.run.replay import replay_run
from penstock.infra.run.runs import RunDir
from penstock.infra.run.summary import run_summary
from penstock.messages.reading.references import is_reference
from penstock.messages.reading.trajectories import last_of

Say = Callable[[str], None]


async def close_run(  # noqa: PLR0913 - all of a run
    run: RunDir, config: RunConfig, bus: NatsBus, say: Say, *, started_at: float, with_replay: bool
) -> bool:
    """Write `summary.json` and `report.html`, and print the closing table.

    Returns:
        Whether the run is sound: it was not given up, the ledger balances, and the replay
        reproduced the weights bit for bit.

    """
    ended_at = time.time()
    fold, episodes = RunFold(), EpisodeCollector()
    replay: dict[str, Any] = {}
    if refusal := replay_refusal(arithmetic_of(config)):
        say(f"no replay: {refusal}")
        with_replay = False
    if with_replay:
        from penstock.actors.trainer.replay import REPLAY_TYPES

        say("replaying the run from its log")
        log = fold_and_yield(bus, (fold, episodes), REPLAY_TYPES)
        replay = await replay_run(run, config, bus, log)
        state = fold.state(fold.last_at)
    else:
        state = await fold_log(bus, episodes)
    metrics = run_summary(state, config, replay, started_at=started_at, ended_at=ended_at)
    encoded = msgspec.json.format(msgspec.json.encode(metrics), indent=2)
    write_atomic(run.summary, encoded + b"\n")
    write_report(run, state, await episodes.packed(run.store(), last_of(bus)))
    for line in closing_table(metrics):
        say(line)
    say(f"report: {run.report}")
    reason = state.run.finish_reason if state.run.is_given_up else None
    faults = faults_of(metrics, replay, reason)
    for fault in faults:
        say(fault)
    return not faults


def faults_of(metrics: dict[str, Any], replay: dict[str, Any], given_up: str | None) -> list[str]:
    """Return the reasons why a run is unsound, from its metrics, its replay and its end."""
    faults: list[str] = []
    if not metrics["ledger"]["balanced"]:
        faults.append("the ledger does not balance: see `penstock status`")
    if difference := replay.get("first_difference"):
        faults.append(f"the replay differs: {difference}")
    if given_up is not None:
        faults.append(f"the run was given up: {given_up}")
    return faults


def write_report(run: RunDir, state: MonitorState, episodes: tuple[bytes, bytes]) -> None:
    """Write `report.html`, a page with state and episodes that needs no server."""
    write_atomic(run.report, render_page(encode_state(state), episodes).encode())


def next_steps(run_dir: RunDir, config: RunConfig) -> list[str]:
    """Return commands that inspect a finished run, ready to be typed in this folder."""
    program = os.path.relpath(sys.argv[0])
    if program.endswith(".py"):  # Started by `python -m`.
        program = f"{os.path.relpath(sys.executable)} -m penstock.infra.cli"
    program += f" --runs-dir {os.path.relpath(run_dir.path.parent)}"
    if _names_own_code(config) and (path := os.environ.get("PYTHONPATH")):  # Where it was found.
        program = f"PYTHONPATH={shlex.quote(path)} {program}"
    run = run_dir.run_id
    return [
        "next:",
        f"  {program} show {run} --where outcome=failed   # episodes; then: show {run} EPISODE",
        f"  {program} chat {run}   # talk to it, and see it use its tools on a task",
        f"  {program} serve {run} --learn   # answer users, and learn from what they say",
        f"  {program} replay {run} --what-if trainer.estimator=rloo   # under another objective",
        f"  {program} export {run} -o model   # weights as a Hugging Face folder",
    ]


def _names_own_code(config: RunConfig) -> bool:
    parts = (config.pacer.harness, config.judge.judge, config.trainer.loss.name)
    makers = [source.make for source in config.prepare.sources]
    if config.prepare.corpora is not None:
        makers.append(config.prepare.corpora.make)
    named = filter(is_reference, (*parts, *makers, config.users.run))
    return any(not each.startswith("penstock.") for each in named)


def closing_table(metrics: dict[str, Any]) -> list[str]:
    """Return the metrics as aligned lines, one per section."""
    rows = [("wall", f"{metrics['wall_s']:.0f} s, seed {metrics['seed']}")]
    if cached := metrics.get("cached"):
        rows.append(("from the cache", ", ".join(cached)))
    for section, values in metrics.items():
        if _is_table(values):
            rows += _rows(section, values)
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows]


def _rows(section: str, values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the line of a section, followed by one per group of metrics in it."""
    plain = {name: value for name, value in values.items() if not _is_table(value)}
    text = ", ".join(f"{name} {_short(value)}" for name, value in plain.items())
    rows = [(section, text)] if text else []
    for name, group in values.items():
        if _is_table(group):
            metrics = {key: value for key, value in group.items() if not _is_table(value)}
            rows += _rows(f"{section} {name}", metrics)
            for member, inner in group.items():
                if _is_table(inner):
                    rows += _rows(f"{section} {member}", inner)
    return rows


def _is_table(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _short(value: Any) -> str:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return {"True": "yes", "False": "no", "None": "-"}.get(str(value), str(value))
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}"
