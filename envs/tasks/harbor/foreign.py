"""Foreign tasks of Harbor's format, graded by their own verifier: apart from the code if they ask.

As Harbor does it, `tests/` lies in `/tests`, `bash /tests/test.sh` runs in the working directory,
and `/logs/verifier/reward.txt`, else `reward.json`, holds its reward. The base image has both
folders, and `/app` as another name of the working directory. Such a verifier shares its user with
the code under test that it starts, so its reward can be forged (`HiddenTests.unseparated`).

With `separated = true` below `[metadata.penstock]` it runs as a user of its own, to whom the
working directory is closed, and reaches the code by the command `as-agent` alone
(`apart/foreign_verifier.py`).
"""

import re
import shlex

import msgspec

from penstock.envs.tasks.apart.programs import (
    VERIFIER_FOLDER,
    commands_peer,
    program,
    verifier_argv,
)
from penstock.envs.tasks.harbor.folder import Tree, below, split_tree
from penstock.messages.sandbox import ExecResult
from penstock.messages.task import HiddenTests

TESTS_FOLDER = "/tests/"
SOLUTION_FOLDER = "/solution/"
"""Where the known solution lies in the machine that tries it, and in no other."""
SOLVE_FILE = "solve.sh"
_REWARD = """\
import json
try:
    reward = float(open("/logs/verifier/reward.txt").read())
except (OSError, ValueError):
    try:
        found = json.load(open("/logs/verifier/reward.json"))
        reward = float(found["reward"] if "reward" in found else sum(found.values()) / len(found))
    except Exception:
        reward = "no reward"
print(1 if not isinstance(reward, str) and abs(reward - 1) < 1e-9 else reward)
"""
_VERIFY = f"""\
mkdir -p /logs/verifier /logs/agent; cd /app; chmod -R a+x {TESTS_FOLDER}
bash /tests/test.sh > /logs/verifier/test-stdout.txt 2>&1
tail -c 2000 /logs/verifier/test-stdout.txt >&2
python3 -I -S -c "$0"
"""
_VERIFY_APART = f"""\
{shlex.join(verifier_argv())}
tail -c 2000 /logs/verifier/test-stdout.txt >&2
python3 -I -S -c "$0"
"""
_FRACTION = re.compile(r"[01]\.[0-9]{1,20}|[0-9](\.[0-9]{1,20})?e-[0-9]{1,3}")
"""As Python writes a float between 0 and 1."""
_VERIFY_ARGV = ["sh", "-c", _VERIFY, _REWARD]
"""Prints 1 for a whole reward, another number for another one. A sum of fractions may miss 1."""
_VERIFY_APART_ARGV = ["sh", "-c", _VERIFY_APART, _REWARD]
_VERIFIER_FILES = {f"{VERIFIER_FOLDER}/verifier.py": program("foreign_verifier")}


class Verifier(msgspec.Struct, frozen=True, kw_only=True):
    """How a foreign verifier is run."""

    env: dict[str, str]
    timeout_s: float
    is_separated: bool
    solution_env: dict[str, str] = {}


def foreign_hidden(
    task_id: str,
    tests: Tree,
    solution: Tree,
    verifier: Verifier,
) -> HiddenTests:
    """Return a foreign verifier as hidden tests.

    Args:
        task_id: Of the task.
        tests: The files of its folder `tests`.
        solution: Those of `solution`.
        verifier: How it is run.

    """
    argv = _VERIFY_APART_ARGV if verifier.is_separated else _VERIFY_ARGV
    own = _VERIFIER_FILES if verifier.is_separated else {}
    parts = split_tree(below(TESTS_FOLDER, tests))
    gold = split_tree(below(SOLUTION_FOLDER, solution))
    return HiddenTests(
        task_id=task_id,
        files=parts.files | own,
        binaries=parts.binaries,
        states=parts.states,
        argv=["env", *(f"{name}={value}" for name, value in verifier.env.items()), *argv],
        expected=["1"],
        timeout_s=verifier.timeout_s,
        gold_files=gold.files,
        gold_binaries=gold.binaries,
        gold_states=gold.states,
        gold_env=verifier.solution_env,
        peer=commands_peer() if verifier.is_separated else [],
        unseparated=not verifier.is_separated,
    )


def _foreign_argv(hidden: HiddenTests) -> list[str] | None:
    """Return the end of a foreign verifier's command, or None for a task of our own."""
    for argv in (_VERIFY_ARGV, _VERIFY_APART_ARGV):
        if hidden.argv[-len(argv) :] == argv:
            return argv
    return None


def foreign_files(hidden: HiddenTests) -> dict[str, bytes] | None:
    """Return the folder's `tests` and `solution` as they were read; None for a task of our own."""
    if _foreign_argv(hidden) is None:
        return None
    tests = {
        f"tests/{path.removeprefix(TESTS_FOLDER)}": data
        for path, data in hidden.contents.items()
        if path not in _VERIFIER_FILES
    }
    gold = hidden.gold_contents.items()
    return tests | {f"solution/{p.removeprefix(SOLUTION_FOLDER)}": data for p, data in gold}


def verifier_env(hidden: HiddenTests) -> dict[str, str]:
    """Return the variables that a foreign task sets for its verifier."""
    pairs = hidden.argv[1 : -len(_foreign_argv(hidden) or [])]
    return dict(pair.split("=", 1) for pair in pairs)


def gives_fractions(hidden: HiddenTests) -> bool:
    """Return whether a verifier may give a part of a whole reward."""
    return _foreign_argv(hidden) is not None


def read_fraction(done: ExecResult, hidden: HiddenTests) -> float | None:
    """Return the reward of a foreign verifier where it is a part of a whole one, in (0, 1).

    A run that was cut, failed, or printed anything else gives none: its reward is 0 or 1.
    """
    is_cut = done.exit_code != 0 or done.timed_out or done.truncated
    if is_cut or not gives_fractions(hidden):
        return None
    last = done.stdout.decode("utf-8", "replace").removesuffix("\n").rpartition("\n")[2]
    if _FRACTION.fullmatch(last) is None:
        return None
    value = float(last)
    return value if 0.0 < value < 1.0 else None
