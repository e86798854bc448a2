"""`penstock show RUN [EPISODE]`: a run's episodes as a list, or one of them whole."""

import argparse
from collections.abc import Iterable
from typing import Literal

import msgspec
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from penstock.actors.monitor.episodes.index import EpisodeIndex
from penstock.actors.monitor.episodes.reading import (
    EpisodeReader,
    EpisodeView,
    TurnView,
    VerdictView,
)
from penstock.infra.judge.audit import audit_flag
from penstock.infra.output import print_result, printable_struct
from penstock.infra.run.hosts import reached_run
from penstock.infra.run.runs import open_log
from penstock.messages.bus import Bus
from penstock.messages.errors import ConfigError, NotFoundError
from penstock.messages.reading.trajectories import last_of
from penstock.messages.requests.episodes import EpisodeFilter, EpisodeRow
from penstock.messages.reward import CheatFinding, Outcome

NUM_FOLDED_MAX = 1_000_000
"""Episodes of the log that are known to the command."""
_UNLIKELY = ((-0.1, ""), (-0.7, "yellow"), (-2.3, "magenta"))
"""Least logprob of each color; what is less likely is red."""


async def show_command(arguments: argparse.Namespace) -> int:
    """List the episodes that the filter keeps, or print the one that is named."""
    wanted = read_filter(arguments.where, arguments.limit)
    run = await reached_run(arguments)
    async with open_log(run, "show") as bus:
        index = await fold_episodes(bus)
        if arguments.episode:
            reader = EpisodeReader(run.store(), last_of(bus))
            found = await reader.read(whole_id(arguments.episode, index), index)
            found = with_flag(found, audit_flag(run, found.row.rollout_id))
            shown = render_episode(found)
        else:
            found = index.select(wanted)
            shown = episode_table(found, len(index))
    if arguments.json:
        print_result(found, as_json=True)
    else:
        Console(markup=False, highlight=False).print(shown)
    return 0


def with_flag(episode: EpisodeView, flag: CheatFinding | None) -> EpisodeView:
    """Return an episode with what an audit of its run says of it among its findings."""
    if flag is None or episode.verdict is None:
        return episode
    findings = [*episode.verdict.findings, flag]
    verdict = msgspec.structs.replace(episode.verdict, findings=findings)
    return msgspec.structs.replace(episode, verdict=verdict)


def read_filter(conditions: Iterable[str], limit: int) -> EpisodeFilter:
    """Read `KEY=VALUE` conditions.

    Raises:
        ConfigError: An unknown key, or a value that it cannot have.

    """
    given: dict[str, object] = {"limit": limit}
    for condition in conditions:
        key, found, value = condition.partition("=")
        if not found or key == "limit":
            names = ", ".join(name for name in EpisodeFilter.__struct_fields__ if name != "limit")
            raise ConfigError(f"--where {condition}: expected KEY=VALUE with KEY of {names}")
        given[key] = value
    try:
        return msgspec.convert(given, EpisodeFilter, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--where: {error}") from error


async def fold_episodes(bus: Bus) -> EpisodeIndex:
    """Return the rows of a log's episodes."""
    index = EpisodeIndex(NUM_FOLDED_MAX)
    async for delivery in bus.follow([*index.handlers], stop_at_end=True):
        index.handlers[type(delivery.event)](delivery.event, delivery.stored_at)
    return index


def whole_id(given: str, index: EpisodeIndex) -> str:
    """Return the id of the one episode that has this id, or whose id begins like this.

    Raises:
        NotFoundError: None has, or several ids begin with it.

    """
    if index.find(given):
        return given
    # Other programs cut ids at the width of a terminal, and mark the cut so.
    prefix = given.removesuffix("…")
    rows = index.select(EpisodeFilter(text=prefix[:256]))
    found = [row.rollout_id for row in rows if row.rollout_id.startswith(prefix)]
    if len(found) != 1:
        some = (
            f"several ids begin with it: {', '.join(found[:5])}"
            if found
            else "no id begins with it"
        )
        raise NotFoundError(f"episode {given!r}: {some}")
    return found[0]


def episode_table(rows: list[EpisodeRow], num_known: int) -> RenderableType:
    """Lay rows out as a table."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    names = ["episode", "task", "end", "outcome", "reward", "turns", "tokens", "step", "fate"]
    has_labels = any(row.num_labels for row in rows)
    for name in [*names, *(["label"] if has_labels else [])]:
        justify: Literal["left", "right"] = (
            "right" if name in {"reward", "turns", "tokens"} else "left"
        )
        # Folded, never cut: ids are what the next command needs.
        table.add_column(name, justify=justify, overflow="fold")
    for row in map(printable_struct, rows):
        table.add_row(
            *(row.rollout_id, row.task_id, row.end or "running", row.outcome or "-"),
            "-" if row.reward is None else f"{row.reward:.2f}",
            *(str(row.num_turns), str(row.num_tokens)),
            *(str(row.step or "-"), _fate(row)),
            *(["-" if row.label is None else f"{row.label:.2f}"] if has_labels else []),
        )
    return Group(table, Text(f"{len(rows)} of {num_known} episodes", style="dim"))


def _fate(row: EpisodeRow) -> str:
    """Return what its step did with an episode; how a trained one was judged is its outcome."""
    if row.fate is None:
        return "-"
    return "trained" if Outcome(row.fate).is_trained else row.fate


def render_episode(episode: EpisodeView) -> RenderableType:
    """Lay an episode out for a terminal."""
    episode = printable_struct(episode)
    row = episode.row
    facts = [
        f"task {row.task_id} ({row.category}), {row.purpose}, group {row.group_id}",
        f"ended: {row.end or 'running'}; {row.num_turns} turns, {row.num_tokens} tokens, "
        f"{row.num_calls} calls, {row.wall_s:.1f} s; versions {row.version_min}..{row.version_max}",
        f"step {row.step}: {_fate(row)}, advantage {row.advantage:+.3f}" if row.step else "no step",
        *([f"infrastructure: {episode.error}"] if episode.error else []),
    ]
    parts: list[RenderableType] = [Panel(Text("\n".join(facts)), title=Text(row.rollout_id))]
    for turn in episode.turns:
        parts.append(_turn(turn))
    if episode.files_missing:
        parts.append(Panel(Text(episode.files_missing), title="no diff"))
    elif episode.diff:
        parts.append(Panel(_colored_diff(episode.diff), title="changes"))
    if episode.verdict:
        parts.append(_verdict(episode.verdict))
    if episode.labels:
        said = [f"{one.labeler}: {one.value:.2f}  {one.comment}" for one in episode.labels]
        parts.append(Panel(Text("\n".join(said)), title="labels"))
    if len(episode.group) > 1:
        parts.append(Panel(episode_table(episode.group, len(episode.group)), title="its group"))
    return Group(*parts)


def _turn(turn: TurnView) -> RenderableType:
    title = f"turn {turn.index}"
    if turn.missing:
        return Panel(Text(turn.missing, style="dim"), title=title)
    versions = ", ".join(f"{span.policy_version}" for span in turn.version_spans)
    sampled = Text()
    for piece, logprob in zip(turn.pieces, turn.logprobs, strict=True):
        sampled.append(piece, style=_style(logprob))
    marks = [
        f"version {versions}",
        *(["new segment"] if turn.starts_segment else []),
        *(["summary"] if turn.is_summary else []),
        *(["withheld"] if turn.is_withheld else []),
        *([f"not parsed: {turn.parse_error}"] if turn.parse_error else []),
    ]
    body = Group(Text(turn.context, style="dim"), sampled)
    return Panel(body, title=Text(f"{title}, {'; '.join(marks)}"), title_align="left")


def _style(logprob: float) -> str:
    return next((style for least, style in _UNLIKELY if logprob >= least), "red")


def _colored_diff(diff: str) -> Text:
    text = Text()
    for line in diff.splitlines():
        style = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "")
        text.append(line + "\n", style=style)
    return text


def _verdict(verdict: VerdictView) -> RenderableType:
    parts = ", ".join(f"{name} {value:+.3f}" for name, value in verdict.components.items())
    lines = [
        f"{verdict.judge}: {verdict.outcome}, reward {verdict.reward:.3f} ({parts}); "
        f"{verdict.num_tests_passed} of {verdict.num_tests} hidden tests pass",
        *(f"{one.judge} {one.criterion}: {one.score}" for one in verdict.scores),
        *(f"{one.kind} at {one.where}: {one.detail}" for one in verdict.findings),
        *([verdict.detail] if verdict.detail else []),
    ]
    return Panel(Text("\n".join(lines)), title="verdict")
