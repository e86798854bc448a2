"""Foreign Harbor tasks: how their verifier runs, and what their environment starts with.

As Harbor does it, `tests/` lies in `/tests`, `bash /tests/test.sh` runs in the working directory,
and `/logs/verifier/reward.txt`, else `reward.json`, says what it is worth. The base image has both
folders, and `/app` as another name of the working directory. No Dockerfile is built: of one, what
`COPY` and `ADD` bring into the working directory is taken; all else is an image layer's to bring,
which the task names as its `docker_image`.

Source: Harbor's task format (harborframework.com/docs/tasks).
"""

import posixpath
import shlex
from collections.abc import Mapping

from penstock.messages.task import HiddenTests

TESTS_FOLDER = "/tests/"
SOLUTION_SCRIPTS = "/tmp/solution/"  # noqa: S108 - the guest's
"""Where the known solution lies in the machine that tries it, and in no other."""
WORK_NAMES = ("/work", "/app")
_COPY_WORDS = 2
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
print(1 if reward == 1 else reward)
"""
_VERIFY = f"""\
mkdir -p /logs/verifier /logs/agent; cd /app; chmod -R a+x {TESTS_FOLDER}
if [ -f {SOLUTION_SCRIPTS}solve.sh ]; then bash {SOLUTION_SCRIPTS}solve.sh; fi > /dev/null 2>&1
bash /tests/test.sh > /logs/verifier/test-stdout.txt 2>&1
tail -c 2000 /logs/verifier/test-stdout.txt >&2
python3 -I -S -c "$0"
"""
_VERIFY_ARGV = ["sh", "-c", _VERIFY, _REWARD]
"""Prints 1 for a whole reward, another number for another one."""


def verify_argv(env: Mapping[str, str]) -> list[str]:
    """Return the verifier's command, with the variables that its task sets."""
    return ["env", *(f"{name}={value}" for name, value in env.items()), *_VERIFY_ARGV]


def foreign_files(hidden: HiddenTests) -> dict[str, str] | None:
    """Return the folder's `tests` and `solution` as they were read; None for a task of our own."""
    if hidden.argv[-len(_VERIFY_ARGV) :] != _VERIFY_ARGV:
        return None
    tests = {f"tests/{p.removeprefix(TESTS_FOLDER)}": text for p, text in hidden.files.items()}
    gold = hidden.gold_files.items()
    return tests | {f"solution/{p.removeprefix(SOLUTION_SCRIPTS)}": text for p, text in gold}


def verifier_env(hidden: HiddenTests) -> dict[str, str]:
    """Return the variables that a foreign task sets for its verifier."""
    pairs = hidden.argv[1 : -len(_VERIFY_ARGV)]
    return dict(pair.split("=", 1) for pair in pairs)


def start_files(dockerfile: str, context: Mapping[str, str]) -> dict[str, str]:
    """Return what an agent finds in the working directory, by its path there.

    Args:
        dockerfile: The text; empty: all of the context lies in the working directory.
        context: The files beside it.

    """
    if not dockerfile:
        return dict(context)
    work = "/"
    placed: dict[str, str] = {}
    for words in _instructions(dockerfile):
        if words[0] == "WORKDIR" and len(words) > 1:
            work = posixpath.normpath(posixpath.join(work, words[1]))
        plain = [word for word in words[1:] if not word.startswith("--")]
        is_local = not any(word.startswith("--from=") for word in words)
        if words[0] in {"COPY", "ADD"} and is_local and len(plain) >= _COPY_WORDS:
            *sources, target = plain
            place = posixpath.join(work, target)
            if posixpath.normpath(place) in {work, *WORK_NAMES}:
                place += "/"
            for source in sources:
                placed |= _copied(context, source, place)
    roots = (*WORK_NAMES, work)  # A folder below /app keeps its name, as the tests know it.
    return {
        posixpath.relpath(path, root): text
        for path, text in placed.items()
        if (root := next((one for one in roots if path.startswith(f"{one}/")), ""))
    }


def _copied(context: Mapping[str, str], source: str, place: str) -> dict[str, str]:
    """Return the files that one source gives: a folder's content, or a file in or as the place."""
    source = posixpath.normpath(source).lstrip("/")
    if source in context:
        into = place.endswith(("/", "/."))
        path = posixpath.join(place, posixpath.basename(source)) if into else place
        return {posixpath.normpath(path): context[source]}
    below = "" if source == "." else f"{source}/"
    return {
        posixpath.normpath(posixpath.join(place, name.removeprefix(below))): text
        for name, text in context.items()
        if name.startswith(below)
    }


def _instructions(dockerfile: str) -> list[list[str]]:
    """Return the words of each instruction; what does not parse as words is left out."""
    found: list[list[str]] = []
    for line in dockerfile.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        if words:
            found.append([words[0].upper(), *words[1:]])
    return found
