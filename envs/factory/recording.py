"""Hidden tests that compare a function with its original by recorded calls.

The program below prints one line per call; it contains the calls but never the right results. The
same program records the original, tries changes, passes the gates and grades. It only imports
built-in modules: others would double the start-up time of the interpreter, and each task runs the
program two dozen times before a policy attempts it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.envs.factory.lab import MachineBench
from penstock.envs.factory.modules import Module
from penstock.envs.tasks.source import Rejection, TaskRejectedError

PROGRAM_FILE = "_hidden.py"
ARGV = ["python3", "-I", "-S", "-B", PROGRAM_FILE]
"""Isolated (-I), so that no module of the working directory shadows one that the program needs."""
RECORD_ARGV = ["python3", "-S", "-B", PROGRAM_FILE]
"""Not isolated, because -I ignores PYTHONHASHSEED."""
FAILED_IMPORT = "failed to import"
RAISED = "raised "
_MISUSES = tuple(
    f"{RAISED}{name}"
    for name in (
        *("TypeError", "AttributeError", "NameError", "UnboundLocalError", "TimeLimit"),
        *("SystemExit", "RecursionError", "MemoryError", "ImportError", "ModuleNotFoundError"),
    )
)
_PROGRAM = """\
import _signal as signal, io, itertools, sys, zlib
sys.path.insert(0, ".")
sys.setrecursionlimit(400)
CALLS = {calls}


class TimeLimit(BaseException):
    pass


def stop(number, frame):
    raise TimeLimit


def show(value):
    if hasattr(value, "__next__"):
        value = list(itertools.islice(value, 50))
    text = repr(value).replace("\\n", "\\\\n")
    if len(text) > 200:
        check = zlib.crc32(text.encode("utf-8", "replace"))
        text = f"{text[:80]} of {len(text)}, crc32:{check:08x}"
    return text


def hush():
    sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
    return sys.stdout


def result(call, scope):
    said = hush()
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        line = show(eval(call, scope))
    except BaseException as error:
        line = "raised " + type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return line + (" printed " + show(said.getvalue()) if said.getvalue() else "")


signal.signal(signal.SIGALRM, stop)
lines = []
hush()
try:
    import {module} as tested
    space = vars(tested)
    lines = [result(call, dict(space)) for call in CALLS]
except BaseException as error:
    lines = ["failed to import"] * len(CALLS)
signal.setitimer(signal.ITIMER_REAL, 0)
sys.__stdout__.write("\\n".join(lines) + "\\n")
"""


def program(module: str, calls: Sequence[str]) -> str:
    """Return the program that prints the result of each call of a module, one per line."""
    rows = "".join(f"\n    {call!r}," for call in calls)
    return _PROGRAM.replace("{calls}", f"[{rows}\n]").replace("{module}", module)


def is_informative(line: str) -> bool:
    """Return whether a recorded line shows a value, not an address or a misuse by the caller."""
    is_about_place = " at 0x" in line or "<built-in" in line or "object>" in line
    is_misuse = line.startswith(_MISUSES)
    return not (is_about_place or is_misuse or line == FAILED_IMPORT)


def is_weak(line: str) -> bool:
    """Return whether a line is weak evidence: None or an error."""
    return line == "None" or line.startswith(RAISED)


_CALLS_MIN = 6
_RESULTS_MIN = 2
_WEAK_SHARE_MAX = 0.34


@dataclass(frozen=True)
class Recording:
    """Calls and the original's result for each."""

    calls: tuple[str, ...]
    lines: tuple[str, ...]


@dataclass(frozen=True)
class TriedChange:
    """A change of the module and the indexes of the calls whose results it changes."""

    kind: str
    source: str
    failed: tuple[int, ...]


async def record(
    bench: MachineBench, module: Module, files: dict[str, str], drawn: Sequence[str], name: str
) -> Recording:
    """Run calls on the original twice and keep informative ones with equal results.

    Raises:
        TaskRejectedError: The module does not run in the machine, or too few calls are informative.

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
        if line == again and is_informative(line)
    ]
    values = [pair for pair in stable if not is_weak(pair[1])]
    # Bounded: tests that mostly expect None or errors pass with almost any code.
    weak = [pair for pair in stable if is_weak(pair[1])][: int(len(values) * _WEAK_SHARE_MAX)]
    kept = values + weak
    if len(values) < _CALLS_MIN or len({line for _, line in kept}) < _RESULTS_MIN:
        detail = f"{name}: {len(values)} of {len(drawn)} calls give a value"
        raise TaskRejectedError(Rejection.TOO_FEW_CALLS, detail)
    return Recording(tuple(call for call, _ in kept), tuple(line for _, line in kept))


async def try_changes(
    bench: MachineBench,
    module: Module,
    files: dict[str, str],
    recording: Recording,
    changes: Sequence[tuple[str, str]],
) -> list[TriedChange]:
    """Return the changes that affect results, with the affected calls.

    Args:
        changes: (kind, whole source of the module) of each change.

    """
    text = program(module.name, recording.calls)
    variants = [{module.file: source} for _, source in changes]
    runs = await bench.run(files | {PROGRAM_FILE: text}, RECORD_ARGV, variants)
    found: list[TriedChange] = []
    for (kind, source), run in zip(changes, runs, strict=True):
        # A change that breaks the import fails every call, which makes too easy a task.
        if run is None or len(run) != len(recording.lines) or run[0] == FAILED_IMPORT:
            continue
        pairs = enumerate(zip(run, recording.lines, strict=True))
        failed = tuple(index for index, (got, expected) in pairs if got != expected)
        if failed:
            found.append(TriedChange(kind, source, failed))
    return found
