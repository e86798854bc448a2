"""Hidden tests that compare a function with its original: recorded calls and their results.

The program below runs in a machine and prints one line a call; it has the calls and never what they
must give. The same program records the original's lines, tries bugs, passes the gates and grades.
It imports only what is built into the interpreter: a library's modules would take as long as the
interpreter's own start, and each task runs it two dozen times before anyone tries it.
"""

from collections.abc import Sequence

PROGRAM_FILE = "_hidden.py"
ARGV = ["python3", "-I", "-S", "-B", PROGRAM_FILE]
"""Isolated: no module of the working directory stands in for one that the program needs."""
RECORD_ARGV = ["python3", "-S", "-B", PROGRAM_FILE]
"""Heeds PYTHONHASHSEED."""
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
    """Return the program that prints what each call of a module gives, one per line."""
    rows = "".join(f"\n    {call!r}," for call in calls)
    return _PROGRAM.replace("{calls}", f"[{rows}\n]").replace("{module}", module)


def tells(line: str) -> bool:
    """Return whether a recorded line is worth comparing: about a value, not about the caller."""
    is_about_place = " at 0x" in line or "<built-in" in line or "object>" in line
    is_misuse = line.startswith(_MISUSES)
    return not (is_about_place or is_misuse or line == FAILED_IMPORT)


def is_weak(line: str) -> bool:
    """Return whether a line says little: nothing given, or an error."""
    return line == "None" or line.startswith(RAISED)
