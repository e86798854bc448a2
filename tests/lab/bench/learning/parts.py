"""Parts of the bench, and the units of work that they consist of.

```
 OUTPUT/<part>/<unit>.json    result of a finished unit, written atomically
 OUTPUT/<part>/runs/          runs of unfinished units, and what later units need of earlier ones
```
"""

import contextlib
import fcntl
import importlib
import re
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from penstock.actors.runtime.files import open_private, private_folder, write_atomic
from penstock.messages.errors import ConfigError, PenstockError
from penstock.messages.reading.parsing import parse_json

PARTS = {
    "summary": "summary",
    "long_episode": "long_episode",
    "async": "asynchrony",
    "off_policy": "off_policy",
    "drafts": "drafts",
}
"""Name in the result -> module beside this one."""
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")

Result = dict[str, Any]
"""What a unit found: plain JSON."""


class UnitFailedError(PenstockError, RuntimeError):
    """A unit of work came to no result; the text says where to look."""


@dataclass(frozen=True)
class Unit:
    """Work of minutes with one result."""

    name: str
    """Lower-case letters, digits and `-`; the file's name."""
    run: Callable[[Path], Result]
    """Takes the part's folder, in which earlier units may have left what this one needs."""

    def __post_init__(self) -> None:
        """Refuse a name that is no file's."""
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"unit: expected a name, {_NAME.pattern}, got {self.name!r}")


class BenchPart(Protocol):
    """A module of this folder."""

    def units(self) -> Sequence[Unit]:
        """Return the work in its order; later units may need what earlier ones left."""
        ...

    def summarize(self, results: Mapping[str, Result]) -> Result:
        """Return the part's figures from the results of all of its units, by name."""
        ...


def open_part(name: str) -> BenchPart:
    """Return the module of a part."""
    module = importlib.import_module(f"tests.lab.bench.learning.{PARTS[name]}")
    return cast("BenchPart", module)


@contextlib.contextmanager
def alone(folder: Path) -> Generator[None]:
    """Hold a folder of results, which is made where it is absent.

    Raises:
        ConfigError: Another process holds it.

    """
    private_folder(folder)
    with open_private(folder / "lock", "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            text = "another process is at work in this folder"
            raise ConfigError(f"learning: {folder}: {text}") from error
        yield


def finish(name: str, part: BenchPart, folder: Path) -> list[str]:
    """Run the units that have no result yet; one that fails does not keep the others from running.

    Args:
        name: Of the part, for the messages.
        part: Its units.
        folder: Of its results.

    Returns:
        One line for each unit that failed.

    """
    failures: list[str] = []
    for unit in part.units():
        path = folder / f"{unit.name}.json"
        if path.exists():
            continue
        _say(f"{name}: {unit.name}")
        started = time.monotonic()
        try:
            result = unit.run(folder)
        except (PenstockError, OSError) as error:
            failures.append(f"{name}: {unit.name}: {error}")
            _say(failures[-1])
            continue
        seconds = round(time.monotonic() - started, 1)
        write_atomic(path, msgspec.json.encode(result | {"seconds": seconds}) + b"\n")
        _say(f"{name}: {unit.name}: {seconds} s")
    return failures


def read_results(part: BenchPart, folder: Path) -> dict[str, Result] | None:
    """Return the result of every unit by its name; None while one is missing.

    Raises:
        CodecError: A file of results is damaged; without it, its unit runs again.

    """
    results: dict[str, Result] = {}
    for unit in part.units():
        path = folder / f"{unit.name}.json"
        if not path.exists():
            return None
        results[unit.name] = parse_json(path.read_bytes(), Result, str(path))
    return results


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
