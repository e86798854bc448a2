"""The end of a run: replay, summary, report, closing table."""

import time
from collections.abc import Callable
from typing import Any, TypeGuard

import msgspec

from penstock.actors.runtime.files import write_atomic
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.run.config import RunConfig
from penstock.infra.run.replay import replay_run
from penstock.infra.run.report import write_report
from penstock.infra.run.runs import RunDir
from penstock.infra.run.summary import Summary

Say = Callable[[str], None]


async def close_run(  # noqa: PLR0913 - all of a run
    run: RunDir, config: RunConfig, bus: NatsBus, say: Say, *, started_at: float, with_replay: bool
) -> bool:
    """Write `summary.json` and `report.html`, and say the closing table.

    Returns:
        Whether the books are right: the ledger balances and the replay gave the same bits.

    """
    wall_s = time.time() - started_at
    summary = Summary(config)
    await summary.read(bus)
    replay: dict[str, Any] = {}
    if with_replay:
        say("replaying the run from its log")
        replay = await replay_run(run, config, bus)
    figures = summary.figures(wall_s, replay)
    encoded = msgspec.json.format(msgspec.json.encode(figures), indent=2)
    write_atomic(run.summary, encoded + b"\n")
    await write_report(run, bus)
    for line in closing_table(figures):
        say(line)
    say(f"report: {run.report}")
    if not figures["ledger"]["balanced"]:
        say("the ledger does not balance: see `penstock status`")
    if difference := replay.get("first_difference"):
        say(f"the replay differs: {difference}")
    return bool(figures["ledger"]["balanced"] and replay.get("identical", True))


def closing_table(figures: dict[str, Any]) -> list[str]:
    """Return the figures as aligned lines, a section each."""
    rows = [("wall", f"{figures['wall_s']:.0f} s, seed {figures['seed']}")]
    for section, values in figures.items():
        if _is_table(values):
            rows += _rows(section, values)
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows]


def _rows(section: str, values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a section's line, and one for each group of figures within it."""
    plain = {name: value for name, value in values.items() if not _is_table(value)}
    text = ", ".join(f"{name} {_short(value)}" for name, value in plain.items())
    rows = [(section, text)] if text else []
    for group in values.values():
        if _is_table(group):
            for member, figures in group.items():
                rows += _rows(f"{section} {member}", figures)
    return rows


def _is_table(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _short(value: Any) -> str:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return {"True": "yes", "False": "no", "None": "-"}.get(str(value), str(value))
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}"
