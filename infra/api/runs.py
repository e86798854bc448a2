"""Runs from Python: start one, follow its events, read its log as tables, replay it."""

import asyncio
import importlib
import os
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import tomli_w

from penstock.infra.cli import make_parser
from penstock.infra.commands.log_file import log_types
from penstock.infra.config.file import load_config
from penstock.infra.run.command import run as run_command
from penstock.infra.run.liveness import has_launcher
from penstock.infra.run.replay import replay_run
from penstock.infra.run.runs import RunDir, find_run, open_log
from penstock.messages.base import Event
from penstock.messages.bus import Delivery
from penstock.messages.errors import ConfigError, NotFoundError, PenstockError
from penstock.messages.reading.parsing import parse_json

_NO_SETTINGS: Mapping[str, object] = {}


class RunFailedError(PenstockError, RuntimeError):
    """A run did not end complete and sound; its folder says why."""


class Run:
    """One run: its folder, its log and its objects.

    Example:
        run = penstock.open_run("latest")
        run.frame("StepCompleted")[["step", "metrics.loss"]]

    """

    def __init__(self, folder: RunDir) -> None:
        self._folder = folder

    @property
    def run_id(self) -> str:
        """Its id, which is the name of its folder."""
        return self._folder.run_id

    @property
    def path(self) -> Path:
        """Its folder."""
        return self._folder.path

    @property
    def summary(self) -> dict[str, Any]:
        """Its closing figures.

        Raises:
            FileNotFoundError: It has not ended yet.

        """
        path = self._folder.summary
        return parse_json(path.read_bytes(), dict[str, Any], str(path))

    async def subscribe(self, *types: str) -> AsyncGenerator[Delivery]:
        """Yield the events of the types, of all if none is given: stored ones, then live ones.

        Ends where the log ends if the run is down; otherwise never.

        Raises:
            NotFoundError: No such type of event.
            BusError: The run's server has ended with it.

        """
        async with open_log(self._folder, "api") as bus:
            is_up = await has_launcher(self._folder, bus)
            async for delivery in bus.follow(_types(types), stop_at_end=not is_up):
                yield delivery

    def events(self, *types: str) -> list[Delivery]:
        """Return the events of the types, of all if none is given, that the log holds by now."""

        async def read() -> list[Delivery]:
            async with open_log(self._folder, "api") as bus:
                found = bus.follow(_types(types), stop_at_end=True)
                return [delivery async for delivery in found]

        return asyncio.run(read())

    def frame(self, kind: str) -> Any:
        """Return the events of one type as a pandas DataFrame, a row each.

        Columns are the event's fields, `table.key` for what is in tables, and `sequence` and
        `stored_at` (unix seconds) of the log; bytes are left out.

        Raises:
            NotFoundError: No such type of event.
            ConfigError: pandas is not installed.

        """
        try:
            pandas: Any = importlib.import_module("pandas")
        except ImportError as error:
            raise ConfigError("frame: needs pandas: pip install -e '.[frames]'") from error
        return pandas.DataFrame([_row(delivery) for delivery in self.events(kind)])

    def replay(self) -> dict[str, Any]:
        """Train every step again from the log; `identical` says whether all bits are the same."""

        async def again() -> dict[str, Any]:
            async with open_log(self._folder, "replay") as bus:
                return await replay_run(self._folder, load_config(self._folder.config), bus)

        return asyncio.run(again())


def open_run(name: str = "latest", runs_dir: str | Path = "runs") -> Run:
    """Return a run by id or path; `latest` is the newest.

    Raises:
        NotFoundError: No such run; the text lists the newest ones.

    """
    return Run(find_run(name, Path(runs_dir)))


def run(
    config: str | Path,
    *,
    settings: Mapping[str, object] = _NO_SETTINGS,
    runs_dir: str | Path = "runs",
    run_id: str = "",
    replay: bool = True,
) -> Run:
    """Run a configuration to its end, as `penstock run` does, and return the run.

    Args:
        config: TOML file.
        settings: Keys in place of the file's, e.g. `{"trainer.steps_max": 10}`.
        runs_dir: Folder of all runs.
        run_id: Of the new run; by default the time.
        replay: Whether to replay it at the end.

    Raises:
        ConfigError: A key is unknown or a value wrong.
        RunFailedError: It did not end complete and sound.

    """
    run_id = run_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    words = [f"--runs-dir={runs_dir}", "run", f"--config={config}", f"--run-id={run_id}"]
    words += [f"--set={key}={_toml(value)}" for key, value in settings.items()]
    words += [] if replay else ["--no-replay"]
    code = run_command(make_parser().parse_args(words))
    if code != 0:
        raise RunFailedError(f"run {run_id}: ended with code {code}; see {Path(runs_dir) / run_id}")
    return open_run(run_id, runs_dir)


def _toml(value: object) -> str:
    return tomli_w.dumps({"value": value}).partition("=")[2].strip()


def _types(names: tuple[str, ...]) -> list[type[Event]]:
    known = {kind.__name__: kind for kind in log_types()}
    if unknown := [name for name in names if name not in known]:
        raise NotFoundError(f"event {unknown[0]}: expected one of {', '.join(sorted(known))}")
    return [known[name] for name in names] or list(known.values())


def _row(delivery: Delivery) -> dict[str, Any]:
    row: dict[str, Any] = {"sequence": delivery.sequence, "stored_at": delivery.stored_at}
    fields = cast("dict[str, Any]", msgspec.to_builtins(delivery.event, builtin_types=(bytes,)))
    _flatten(fields, "", row)
    return row


def _flatten(fields: dict[str, Any], prefix: str, row: dict[str, Any]) -> None:
    for key, value in fields.items():
        if isinstance(value, dict):
            _flatten(cast("dict[str, Any]", value), f"{prefix}{key}.", row)
        elif not isinstance(value, bytes):
            row[f"{prefix}{key}"] = value
