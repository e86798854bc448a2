"""What a Dockerfile brings into the working directory: it is read, and never built. Pure."""

import posixpath
import shlex
from collections.abc import Mapping

from penstock.envs.tasks.harbor_folder import BYTES_MAX, FILES_MAX, SETTINGS_BYTES_MAX
from penstock.messages.errors import PenstockError

LINES_MAX = 1_000
WORK_NAMES = ("/work", "/app")
_COPY_WORDS = 2


class DockerfileError(PenstockError, ValueError):
    """A Dockerfile is out of bounds."""


def start_files(dockerfile: str, context: Mapping[str, str]) -> dict[str, str]:
    """Return what an agent finds in the working directory, by its path there.

    Args:
        dockerfile: The text; empty: all of the context lies in the working directory.
        context: The files beside it.

    Raises:
        DockerfileError: It is too long, or gives more than one folder of a task may hold.

    """
    if len(dockerfile) > SETTINGS_BYTES_MAX or dockerfile.count("\n") > LINES_MAX:
        raise DockerfileError(f"expected {SETTINGS_BYTES_MAX} bytes, {LINES_MAX} lines at most")
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
                _check_size(placed)
    roots = (*WORK_NAMES, work)  # A folder below /app keeps its name, as the tests know it.
    return {
        posixpath.relpath(path, root): text
        for path, text in placed.items()
        if (root := next((one for one in roots if path.startswith(f"{one}/")), ""))
    }


def _check_size(placed: Mapping[str, str]) -> None:
    if len(placed) > FILES_MAX or sum(map(len, placed.values())) > BYTES_MAX:
        raise DockerfileError(f"gives more than {FILES_MAX} files or {BYTES_MAX} bytes")


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
