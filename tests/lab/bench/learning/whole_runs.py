"""Whole runs as units of work: started or resumed, exported, and read for how each task went."""

import asyncio
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from tests.lab.bench.learning.parts import Result, UnitFailedError

from penstock import infra
from penstock.infra.run.runs import RunDir, open_log
from penstock.messages.reading.parsing import parse_json
from penstock.messages.reward import Outcome, Verdict
from penstock.messages.rollout import RolloutFinished

CONFIGS = Path(infra.__file__).parent / "configs"
_EXPORT_S_MAX = 300.0
_RUN_S_MAX = 4 * 3600.0
"""Beyond `run.wall_s_max`, which ends a run in order."""


def complete_run(
    folder: Path,
    run_id: str,
    config: Path,
    settings: Mapping[str, object],
    *,
    with_replay: bool = True,
) -> RunDir:
    """Return a run once it is complete and sound: it is started, resumed, or was so before.

    Args:
        folder: Of its runs.
        run_id: Its own.
        config: Of a new run.
        settings: Keys of the configuration that a new run replaces, by path.
        with_replay: Whether its steps, if it has some, are replayed.

    Raises:
        UnitFailedError: It did not become complete and sound; the text names its output.

    """
    run = RunDir(folder / run_id)
    if not run.summary.exists():
        if run.config.exists():
            words = ["--resume", run_id]
        else:
            pairs = (f"{key}={toml_text(value)}" for key, value in settings.items())
            words = ["--config", str(config), "--run-id", run_id]
            words += [word for pair in pairs for word in ("--set", pair)]
        if not with_replay or settings.get("trainer.steps_max") == 0:
            words.append("--no-replay")
        _penstock(folder, f"{run_id}.output", ["run", *words], _RUN_S_MAX)
    _check_sound(run)
    return run


def _check_sound(run: RunDir) -> None:
    """Refuse a run that ended, and whose figures say nothing.

    Raises:
        UnitFailedError: It was given up, or log and weights do not agree.

    """
    figures = parse_json(run.summary.read_bytes(), Result, str(run.summary))
    faults = {
        "it was given up": figures["rl"]["given_up"],
        "its ledger does not balance": not figures["ledger"]["balanced"],
        "its replay differs": not figures["replay"].get("identical", True),
    }
    found = [words for words, is_so in faults.items() if is_so]
    if found:
        text = f"run {run.run_id}: {', '.join(found)}"
        raise UnitFailedError(f"{text}; without its folder, {run.path}, it runs again")


def export_newest(run: RunDir, target: Path) -> Path:
    """Write a run's newest version as a model folder, unless that is there, and return it."""
    if not target.exists():
        words = ["export", run.run_id, "-o", str(target)]
        _penstock(run.path.parent, f"{run.run_id}.output", words, _EXPORT_S_MAX)
    return target


def replay_figures(runs: Sequence[Result]) -> Result:
    """Return of how many runs the replay was made, and whether all gave the same bits."""
    replays = [run["replay"] for run in runs if run["replay"]]
    return {
        "num_replayed": len(replays),
        "replay_identical": bool(replays) and all(replay["identical"] for replay in replays),
    }


class EvaluatedTask(msgspec.Struct, frozen=True, kw_only=True):
    """How an evaluation's attempt at a task went."""

    solved: bool
    num_turns: int
    num_calls: int
    num_segments: int


def evaluated_tasks(run: RunDir, policy_version: int) -> dict[str, EvaluatedTask]:
    """Return the attempts of a version's evaluation by task id, without masked ones.

    Raises:
        BusError: The run's log cannot be read.

    """
    return asyncio.run(_evaluated_tasks(run, f"v{policy_version}"))


async def _evaluated_tasks(run: RunDir, eval_id: str) -> dict[str, EvaluatedTask]:
    solved: dict[str, bool] = {}
    ended: dict[str, RolloutFinished] = {}
    async with open_log(run, "bench") as bus:
        async for delivery in bus.follow((RolloutFinished, Verdict), stop_at_end=True):
            match delivery.event:
                case RolloutFinished(group_id=group_id) as event if group_id == eval_id:
                    ended[event.rollout_id] = event
                case Verdict(group_id=group_id) as event if group_id == eval_id:
                    if not event.outcome.is_masked:
                        solved[event.rollout_id] = event.outcome is Outcome.SOLVED
                case _:
                    pass
    return {
        ended[rollout_id].task_id: EvaluatedTask(
            solved=is_solved,
            num_turns=len(ended[rollout_id].turns),
            num_calls=ended[rollout_id].num_calls,
            num_segments=ended[rollout_id].num_segments,
        )
        for rollout_id, is_solved in solved.items()
        if rollout_id in ended
    }


def toml_text(value: object) -> str:
    """Return a value as TOML writes it."""
    return msgspec.toml.encode({"x": value}).decode().removeprefix("x =").strip()


def _penstock(folder: Path, output: str, words: Sequence[str], seconds_max: float) -> None:
    """Run a command of ours on the runs of a folder; its output is appended to a file there."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "penstock.infra.cli", "--runs-dir", str(folder), *words]
    path = folder / output
    with path.open("ab") as file:
        try:
            code = subprocess.run(
                command, stdout=file, stderr=file, timeout=seconds_max, check=False
            ).returncode
        except subprocess.TimeoutExpired as error:
            text = f"{words[0]} took more than {seconds_max:.0f} s; see {path}"
            raise UnitFailedError(text) from error
    if code:
        raise UnitFailedError(f"{words[0]} ended with exit code {code}; see {path}")
