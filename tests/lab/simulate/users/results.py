"""What a simulation has finished, in a folder: started again, it goes on from there."""

import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tests.lab.simulate.users.settings import UsersScenario

from penstock.actors.runtime.files import read_small, write_atomic
from penstock.messages.errors import ConfigError
from penstock.messages.reading.parsing import parse_json

R = TypeVar("R")
RESULT_BYTES_MAX = 1 << 20


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    scenario: UsersScenario
    result: Any


class Results:
    """Results of one scenario, a file each; without a folder, none."""

    def __init__(self, scenario: UsersScenario, folder: Path | None) -> None:
        self._scenario, self._folder = scenario, folder

    def read(self, name: str, kind: type[R]) -> R | None:
        """Return what was found before; None of what was not run to its end.

        Raises:
            ConfigError: It is another scenario's, or cannot be read: a pipe, say.
            CodecError: The file is none of these.

        """
        if self._folder is None or not os.path.lexists(file := self._file(name)):
            return None
        stored = parse_json(read_small(file, RESULT_BYTES_MAX), _Stored, str(file))
        if _basis(stored.scenario) != _basis(self._scenario):
            raise ConfigError(f"--results: {file}: of another scenario; name another folder")
        return parse_json(msgspec.json.encode(stored.result), kind, str(file))

    def write(self, name: str, result: object) -> None:
        """Keep a result."""
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            data = msgspec.json.encode({"scenario": self._scenario, "result": result})
            write_atomic(self._file(name), data)

    def _file(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{name}.json"


def _basis(scenario: UsersScenario) -> UsersScenario:
    """Return what a result depends on: with more seeds, those that there are stay."""
    return msgspec.structs.replace(scenario, num_attack_seeds=0)
