"""What a sink is given, and what it must keep: each event of the log once, across restarts."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

import msgspec

from penstock.actors.runtime.files import write_atomic
from penstock.infra.sinks.rows import Row
from penstock.infra.sinks.traces import TraceSpan
from penstock.messages.base import Stream
from penstock.messages.errors import ConfigError, CorruptDataError
from penstock.messages.reading.parsing import parse_json

SINKS = {
    "tensorboard": "penstock.infra.sinks.tensorboard:TensorBoardSink",
    "wandb": "penstock.infra.sinks.wandb:WandbSink",
    "otel": "penstock.infra.sinks.otel:OtelSink",
}
"""Name -> its class; the name is also that of the extra that installs its library."""


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """How far a sink has come, in the file `cursor.json` of its folder."""

    after: dict[Stream, int] = {}
    """By stream, the sequence of the last event written."""
    num_bytes: int = 0
    """Length of the sink's file with these events and no more; 0 where it has no file."""


class Sink(Protocol):
    """Writes rows and spans to one place. One process at a time holds its folder."""

    @property
    def after(self) -> dict[Stream, int]:
        """By stream, the last sequence that need not be read again."""
        ...

    async def write(
        self, rows: Sequence[Row], spans: Sequence[TraceSpan], after: dict[Stream, int]
    ) -> None:
        """Write what was read up to `after`, in the order of the log.

        Raises:
            PenstockError: It is not written, or not known to be: the same comes again.

        """
        ...

    async def close(self) -> None:
        """Finish what was written; idempotent."""
        ...


class SinkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What every sink is opened with."""

    run_id: str
    folder: Path
    endpoint: str = ""
    """Base URL of an OTLP receiver."""
    allow_plain_text: Sequence[str] = ()
    """Hosts off this machine that may get metrics and headers over `http://`."""


class SinkClass(Protocol):
    """How a sink is opened."""

    def __call__(self, settings: SinkSettings) -> Sink:
        """Open it; what a killed one left half written is taken back.

        Raises:
            ConfigError: A setting is wrong.
            ImportError: Its library is not installed.

        """
        ...


def open_sink(name: str, settings: SinkSettings) -> Sink:
    """Open a sink by name.

    Raises:
        ConfigError: Its library is not installed; a setting is wrong.

    """
    module, _, kind = SINKS[name].partition(":")
    try:
        made = cast("SinkClass", getattr(importlib.import_module(module), kind))
    except ImportError as error:
        text = f"needs a library that is not installed ({error.name})"
        raise ConfigError(f"sink {name}: {text}: pip install -e '.[{name}]'") from error
    return made(settings)


def read_cursor(folder: Path) -> Cursor | None:
    """Return the cursor of a sink's folder; None where nothing was written yet.

    Raises:
        CorruptDataError: The file is damaged.

    """
    path = folder / "cursor.json"
    try:
        return parse_json(path.read_bytes(), Cursor, str(path))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CorruptDataError(f"{path}: {error}: delete {folder} to write all again") from error


def write_cursor(folder: Path, cursor: Cursor) -> None:
    """Replace the cursor atomically."""
    write_atomic(folder / "cursor.json", msgspec.json.encode(cursor))
