"""Runs a function's calls on its original and on changed modules, in one machine."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.envs.factory.differential import (
    FAILED_IMPORT,
    PROGRAM_FILE,
    RECORD_ARGV,
    is_weak,
    program,
    tells,
)
from penstock.envs.factory.modules import Module
from penstock.envs.tasks.source import Bench, Rejection, TaskRejectedError

_CALLS_MIN = 6
_RESULTS_MIN = 2
_WEAK_SHARE_MAX = 0.34


@dataclass(frozen=True)
class Recording:
    """Calls and what the original gives for each."""

    calls: tuple[str, ...]
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Tried:
    """A change of the module and the indexes of the calls whose results it changes."""

    kind: str
    source: str
    failed: tuple[int, ...]


async def record(
    bench: Bench, module: Module, files: dict[str, str], drawn: Sequence[str], name: str
) -> Recording:
    """Run calls on the original twice and keep those that tell something, the same both times.

    Raises:
        TaskRejectedError: The module does not run in the machine, or too few calls tell.

    """
    text = program(module.name, drawn)
    first, second = await bench.run(files | {PROGRAM_FILE: text}, RECORD_ARGV, [{}, {}])
    if first is None or second is None or len(first) != len(drawn):
        raise TaskRejectedError(Rejection.DOES_NOT_RUN, f"{name}: no results")
    if first[0] == FAILED_IMPORT:
        raise TaskRejectedError(Rejection.DOES_NOT_RUN, f"{name}: cannot be imported")
    stable = [
        (call, line)
        for call, line, again in zip(drawn, first, second, strict=True)
        if line == again and tells(line)
    ]
    values = [pair for pair in stable if not is_weak(pair[1])]
    weak = [pair for pair in stable if is_weak(pair[1])][: int(len(values) * _WEAK_SHARE_MAX)]
    kept = values + weak
    if len(values) < _CALLS_MIN or len({line for _, line in kept}) < _RESULTS_MIN:
        detail = f"{name}: {len(values)} of {len(drawn)} calls give a value"
        raise TaskRejectedError(Rejection.TOO_FEW_CALLS, detail)
    return Recording(tuple(call for call, _ in kept), tuple(line for _, line in kept))


async def try_changes(
    bench: Bench,
    module: Module,
    files: dict[str, str],
    recording: Recording,
    changes: Sequence[tuple[str, str]],
) -> list[Tried]:
    """Return the changes that show, with the calls that they show in.

    Args:
        bench: A machine.
        module: The changed one.
        files: The repository.
        recording: Of the original.
        changes: Kind and the module's whole source of each.

    """
    text = program(module.name, recording.calls)
    variants = [{module.file: source} for _, source in changes]
    runs = await bench.run(files | {PROGRAM_FILE: text}, RECORD_ARGV, variants)
    found: list[Tried] = []
    for (kind, source), run in zip(changes, runs, strict=True):
        if run is None or len(run) != len(recording.lines) or run[0] == FAILED_IMPORT:
            continue
        pairs = enumerate(zip(run, recording.lines, strict=True))
        failed = tuple(index for index, (got, wanted) in pairs if got != wanted)
        if failed:
            found.append(Tried(kind, source, failed))
    return found
