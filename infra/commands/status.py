"""`penstock status RUN` and `penstock top`: the state of a run on a terminal."""

import argparse
import asyncio
import contextlib
import sys
import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from penstock.actors.monitor.judge_views import JudgeView
from penstock.actors.monitor.log_folds import fold_log
from penstock.actors.monitor.state import (
    ActorView,
    MonitorState,
    RegionView,
    decode_state,
    encode_state,
)
from penstock.infra.commands.experiment import render_candidate
from penstock.infra.output import printable, printable_struct, write_to
from penstock.infra.run.hosts import reached_run
from penstock.infra.run.liveness import has_launcher
from penstock.infra.run.runs import open_log
from penstock.messages.bus import Bus
from penstock.messages.errors import BusError, DeadlineError
from penstock.messages.telemetry import MonitorSnapshot, ReadMonitor

ANSWER_S = 3.0
READ_S = 10.0
PERIOD_S = 1.0
NUM_LOG_LINES = 8
SHARE_SHOWN = 0.02
"""Minimum share of the CPU time for which a role is shown."""
_PHASES = {
    "starting": "starting",
    "midtrain": "mid-training",
    "rl": "reinforcement learning",
    "serving": "serving",
}


async def status_command(arguments: argparse.Namespace) -> int:
    """Print a run's state once."""
    run = await reached_run(arguments)
    async with open_log(run, "status") as bus:
        is_running = await has_launcher(run, bus)
        state = await read_state(bus, is_up=is_running)
    if arguments.json:
        write_to(sys.stdout, printable(encode_state(state).decode()) + "\n")
    else:
        Console(markup=False).print(render(state, is_up=is_running))
    return 0


async def top_command(arguments: argparse.Namespace) -> int:
    """Show a run's state once a second until it ends, then its final state."""
    run = await reached_run(arguments)
    console = Console(markup=False)
    if run.access() is not None or run.read_state() is not None:
        async with open_log(run, "top") as bus:
            with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
                while await has_launcher(run, bus):
                    with contextlib.suppress(BusError, TimeoutError):  # The run may be ending.
                        async with asyncio.timeout(READ_S):
                            state = await read_state(bus, is_up=True)
                        # Here and not by a timer of `rich`: nothing changes in between.
                        live.update(render(state), refresh=True)
                    await asyncio.sleep(PERIOD_S)
    arguments.json = False
    return await status_command(arguments)


async def read_state(bus: Bus, *, is_up: bool) -> MonitorState:
    """Return the state of a run from its monitor, or from the log if no monitor answers."""
    if is_up:
        with contextlib.suppress(DeadlineError):
            reply = await bus.request("monitor.state", ReadMonitor(), deadline_s=ANSWER_S)
            assert isinstance(reply, MonitorSnapshot)
            return decode_state(reply.state_json)
    return await fold_log(bus)


def render(state: MonitorState, *, is_up: bool = True) -> RenderableType:
    """Format the state for a terminal."""
    state = printable_struct(state)
    parts: list[RenderableType] = [_headline(state, is_up=is_up), _metrics(state)]
    if state.regions:
        parts.append(_regions(state.regions))
    if state.judges:
        parts.append(_judges(state.judges))
    if state.actors:
        parts.append(_actors(state))
    if state.gates.channels or state.gates.candidate:
        parts.append(render_candidate(state.gates.channels, state.gates.candidate))
    parts.append(_log(state))
    return Group(*parts)


def _headline(state: MonitorState, *, is_up: bool) -> Panel:
    run, stall = state.run, state.stall
    done = run.phase == "finished"
    phase = f"finished: {run.finish_reason}" if done else _PHASES[run.phase]
    if not done and not is_up:
        phase = f"stopped in {phase}"
    elapsed_s = max(0.0, run.now - run.started_at) if run.started_at else 0.0
    title = f"{run.run_id or 'no run yet'} · {phase} · step {run.step} · {elapsed_s:.0f} s"
    style = "red" if stall.is_stalled else "green" if done else "cyan"
    lead = "stalled: " if stall.is_stalled else "" if done else "waiting: "
    words = Text(f"{lead}{stall.words}")
    return Panel(words, title=Text(title), title_align="left", border_style=style)


def _metrics(state: MonitorState) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), expand=False)
    for _ in range(4):
        table.add_column(overflow="fold")
    pairs = _pairs(state)
    for left, right in zip(pairs[::2], pairs[1::2], strict=True):
        table.add_row(Text(left[0], "dim"), left[1], Text(right[0], "dim"), right[1])
    return table


def _pairs(state: MonitorState) -> list[tuple[str, str | Text]]:
    step = state.steps[-1].metrics if state.steps else {}
    staleness, live, sandbox = state.staleness, state.live, state.sandbox
    budget = str(staleness.budget_max) if staleness.budget_max >= 0 else "?"
    machines = f"{sandbox.num_vms} of {sandbox.backend or '?'}, boot {sandbox.boot_ms_p50:.0f} ms"
    users = f"{live.num_requests} requests, {live.num_feedback} signals, {live.num_trained} trained"
    return [
        ("held-out pass rate", _held_out(state)),
        ("reward, pass rate", f"{_number(step, 'reward_mean')}, {_number(step, 'pass_rate')}"),
        ("mid-training", _midtrain(state)),
        ("mismatch k1, k3", f"{_number(step, 'mismatch_k1')}, {_number(step, 'mismatch_k3')}"),
        (
            "k3: engine, staleness",
            f"{_number(step, 'mismatch_engine_k3')}, {_number(step, 'mismatch_staleness_k3')}",
        ),
        ("entropy, KL", f"{_number(step, 'entropy')}, {_number(step, 'kl_reference')}"),
        ("staleness seen", f"{staleness.seen_max} of {budget}"),
        ("ESS", _number(step, "ess")),
        ("ledger", _ledger(state)),
        ("rollouts", f"{state.rollouts.num_finished}"),
        ("training tasks", state.tasks.words),
        ("sets, sources", _sets(state)),
        ("virtual machines", machines),
        ("users", users),
        ("charged, quarantined", f"{state.charges.num_proven}, {state.charges.num_quarantined}"),
        ("newest in quarantine", _quarantined(state)),
        ("calls, turns per solved", _effort(state)),
        ("parallel turns, look first", _habits(state)),
        ("CPU time", _cpu_time(state)),
        ("a step waits (95%)", f"{state.training.wait_s_p95 or 0.0:.1f} s"),
    ]


def _cpu_time(state: MonitorState) -> str:
    view = state.compute
    if not view.processor_s:
        return "not measured"
    most = [(name, role.share) for name, role in view.roles.items() if role.share >= SHARE_SHOWN]
    return f"{view.processor_s:,.0f} s: " + ", ".join(f"{n} {share:.0%}" for n, share in most)


def _held_out(state: MonitorState) -> str:
    rates = [e.num_solved / max(1, e.num_tasks) for e in state.evals]
    if not rates:
        return "not evaluated"
    first = f"{rates[0]:.0%} → " if len(rates) > 1 else ""
    return f"{first}{rates[-1]:.0%} (version {state.evals[-1].policy_version})"


def _sets(state: MonitorState) -> str:
    newest = {name: points[-1] for name, points in state.tasks.sets.items() if name}
    rates = [f"{name} {one.pass_rate:.0%}" for name, one in newest.items()]
    if len(state.tasks.sources) > 1:
        sources = state.tasks.sources.items()
        rates += [f"training on {name} {view.pass_rate:.0%}" for name, view in sources]
    return ", ".join(rates) or "–"


def _effort(state: MonitorState) -> str:
    recent = state.behavior.recent
    if recent is None or not recent.num_solved:
        return "–"
    return f"{recent.calls_per_solved:.2f}, {recent.turns_per_solved:.2f}"


def _habits(state: MonitorState) -> str:
    recent = state.behavior.recent
    if recent is None or not recent.num_turns:
        return "–"
    return f"{recent.parallel_share:.0%}, {recent.looked_share:.0%}"


def _midtrain(state: MonitorState) -> str:
    view = state.midtrain
    if not view.num_tokens:
        return "not begun"
    return (
        f"{view.num_tokens:,} tokens, loss {view.loss_last:.3f}, held out {view.heldout_loss:.3f}"
    )


def _ledger(state: MonitorState) -> str | Text:
    totals = state.ledger.totals
    if not state.ledger.balanced:
        return Text(f"does not balance: {state.ledger.num_violations} faults", "red")
    return f"balanced, {totals.generated:,} tokens, {totals.in_flight:,} in flight"


def _quarantined(state: MonitorState) -> str:
    if not state.charges.quarantined:
        return "–"
    last = state.charges.quarantined[-1]
    at = time.strftime("%H:%M:%S", time.localtime(last.at))
    return escape(f"{last.item} at {at}: {last.cause}")


def _number(metrics: dict[str, float], name: str) -> str:
    return f"{metrics[name]:.3g}" if name in metrics else "–"


def _regions(regions: dict[str, RegionView]) -> Table:
    table = Table(
        "region", "serves", "behind", "received", "last delta", "ratio", "pause", "digests",
        box=None,
    )  # fmt: skip
    for name, region in regions.items():
        last = region.deltas[-1] if region.deltas else None
        served = ", ".join(
            f"{replica} {'lost' if replica in region.lost else f'v{version}'}"
            for replica, version in region.replicas.items()
        )
        bad = region.num_digest_mismatches
        table.add_row(
            name,
            served or "–",
            f"{region.lag_versions} versions, {region.lag_s:.1f} s" if region.lag_versions else "0",
            f"{region.num_bytes / 1e6:.2f} MB",
            f"{last.num_bytes / 1e3:.1f} kB" if last else "–",
            f"{last.ratio:.1f}×" if last and last.ratio else "–",
            f"{last.pause_ms:.1f} ms" if last else "–",
            Text(f"{bad} wrong", "red") if bad else "equal",
        )
    return table


def _judges(judges: dict[str, JudgeView]) -> Table:
    table = Table("judge", "scored", "mean", "disagree", "failed", "tokens", "note", box=None)
    for name, view in sorted(judges.items()):
        style = "red" if view.is_failing else "dim"
        table.add_row(
            name,
            str(view.num_scored),
            f"{view.score_mean:.3f}" if view.num_scored else "–",
            f"{view.disagreement_mean:.3f}" if view.num_scored else "–",
            Text(str(view.num_failed), "red" if view.is_failing else ""),
            f"{view.num_prompt_tokens:,} + {view.num_reply_tokens:,}",
            Text(f"not scoring: {view.note}" if view.is_failing else view.note or "–", style),
        )
    return table


def _actors(state: MonitorState) -> Table:
    table = Table("actor", "busy", "queued", "restarts", "waits for", box=None)
    for name, view in sorted(state.actors.items()):
        if view.has_ended:
            continue
        restarts = str(max(0, view.num_starts - 1))
        is_over = state.run.phase == "finished"
        busy = f"{view.busy_fraction if is_over else view.busy_fraction_recent:.0%}"
        has_reports = view.uptime_s > 0  # The log of a stopped run holds none.
        busy, queued = (busy, str(view.num_queued)) if has_reports else ("–", "–")
        table.add_row(name, busy, queued, restarts, _waits_for(view, state))
    return table


def _waits_for(view: ActorView, state: MonitorState) -> Text:
    # An actor that is stuck in native code cannot report its own wait.
    if not view.is_reporting and state.run.phase != "finished":
        silent_s = state.run.now - view.at
        return Text(f"no report for {silent_s:.0f} s {view.last_error}".rstrip(), "red")
    if not view.waits or state.run.phase == "finished":
        return Text("–", "dim")
    wait = view.waits[0]
    waited_s = max(0.0, state.run.now - wait.since)
    style = "red" if waited_s > wait.deadline_s else ""
    return Text(f"{wait.target} for {waited_s:.1f} s: {wait.reason}", style)


def _log(state: MonitorState) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    styles = {"error": "red", "warn": "yellow", "info": ""}
    for line in state.log[-NUM_LOG_LINES:]:
        at = time.strftime("%H:%M:%S", time.localtime(line.at))
        table.add_row(Text(at, "dim"), Text(line.text, styles[line.level]))
    return table
