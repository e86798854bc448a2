"""What a Dockerfile brings into the working directory, read without building it. Pure."""

import os
import posixpath
import shlex
from collections.abc import Sequence

import msgspec

from penstock.envs.sandbox import WORK_NAMES
from penstock.envs.tasks.harbor.folder import BYTES_MAX, FILES_MAX, SETTINGS_BYTES_MAX, Tree
from penstock.messages.errors import PenstockError
from penstock.messages.task import FileKind

LINES_MAX = 1_000
_COPY_WORDS = 2
_SHOWN_CHARACTERS = 120
_BASES = {"scratch", "debian", "ubuntu", "python", "buildpack-deps"}
_WITHOUT_EFFECT = {"ARG", "LABEL", "MAINTAINER", "EXPOSE", "CMD", "STOPSIGNAL"}
"""In an episode: Harbor replaces the command, too."""


class StartFilesError(PenstockError, ValueError):
    """A Dockerfile is out of bounds, or asks for an image, which is not here."""

    def __init__(self, text: str, *, needs_image: bool = False) -> None:
        super().__init__(text)
        self.needs_image = needs_image


def start_files(dockerfile: str, context: Tree) -> Tree:
    """Return what an agent finds in the working directory, by its path there.

    Args:
        dockerfile: The text; empty: all of the context lies in the working directory.
        context: The files beside it.

    Raises:
        StartFilesError: It is too long, or gives more than one folder of a task may hold.

    """
    if len(dockerfile) > SETTINGS_BYTES_MAX or dockerfile.count("\n") > LINES_MAX:
        raise StartFilesError(f"expected {SETTINGS_BYTES_MAX} bytes, {LINES_MAX} lines at most")
    if not dockerfile:
        return dict(context)
    work = "/"
    placed: Tree = {}
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
                if len(placed) > FILES_MAX or _num_bytes(placed) > BYTES_MAX:
                    raise StartFilesError(f"gives more than {FILES_MAX} files or {BYTES_MAX} bytes")
    roots = (*WORK_NAMES, work)  # A folder below /app keeps its name, as the tests know it.
    return _named(
        {
            posixpath.relpath(path, root): one
            for path, one in placed.items()
            if (root := next((one for one in roots if path.startswith(f"{one}/")), ""))
        }
    )


def _num_bytes(tree: Tree) -> int:
    return sum(len(one.data or b"") for one in tree.values())


def _named(tree: Tree) -> Tree:
    """Give each file the path under which it is; of a hard link whose file is not there, none."""
    names = {one.path: os.fsencode(path) for path, one in tree.items()}
    return {
        path: msgspec.structs.replace(
            one, path=os.fsencode(path), target=names.get(one.target, one.target)
        )
        for path, one in tree.items()
        if one.kind is not FileKind.HARD_LINK or one.target in names
    }


def check_instructions(dockerfile: str, context: Tree) -> None:
    """Check that files in the working directory are all that a Dockerfile adds to its base.

    Raises:
        StartFilesError: It does more; the text begins with the instruction. First comes what no
            image mends.

    """
    work, num_stages = "/", 0
    images: list[StartFilesError] = []
    for words in _instructions(dockerfile):
        if words[0] == "WORKDIR":
            work = posixpath.normpath(posixpath.join(work, *words[1:2]))
        num_stages += words[0] == "FROM"
        try:
            _check_instruction(words, context, work, num_stages)
        except StartFilesError as error:
            if not error.needs_image:
                raise
            images.append(error)
    if work not in {"/", *WORK_NAMES}:
        text = f"expected one of {', '.join(WORK_NAMES)}"
        images.append(StartFilesError(f"WORKDIR: {text}, got {work!r}", needs_image=True))
    if images:
        raise images[0]
    _instructions(dockerfile, strictly=True)


def _check_instruction(words: Sequence[str], context: Tree, work: str, num_stages: int) -> None:
    name, shown = words[0], " ".join(words)[:_SHOWN_CHARACTERS]
    if name == "FROM":
        _check_base(words[1:], shown, num_stages)
    elif name in {"COPY", "ADD"}:
        _check_copy(words[1:], context, work, shown)
    elif name not in {"WORKDIR", *_WITHOUT_EFFECT}:
        raise StartFilesError(f"{name}: {shown!r}: expected an image that has it", needs_image=True)


def _check_base(arguments: Sequence[str], shown: str, num_stages: int) -> None:
    """Check that the machines' own base image can stand for this one."""
    image = next((word for word in arguments if not word.startswith("--")), "")
    is_plain = image.partition("@")[0].partition(":")[0].removeprefix("docker.io/library/")
    if num_stages > 1 or is_plain not in _BASES:
        choices = ", ".join(sorted(_BASES))
        text = f"expected one stage, from one of {choices}"
        raise StartFilesError(f"FROM: {shown!r}: {text}", needs_image=True)


def _check_copy(arguments: Sequence[str], context: Tree, work: str, shown: str) -> None:
    plain = [word for word in arguments if not word.startswith("--")]
    options = [word for word in arguments if word.startswith("--")]
    if any(not option.startswith("--chown=") for option in options):
        text = "expected no option but --chown"
        raise StartFilesError(f"COPY: {shown!r}: {text}", needs_image=True)
    if len(plain) < _COPY_WORDS or any("$" in word or word.startswith("[") for word in plain):
        text = "expected sources and a target, as plain words"
        raise StartFilesError(f"COPY: {shown!r}: {text}", needs_image=True)
    *sources, target = plain
    place = posixpath.normpath(posixpath.join(work, target))
    if not any(f"{place}/".startswith(f"{root}/") for root in WORK_NAMES):
        text = f"expected a target in {' or '.join(WORK_NAMES)}, got {place!r}"
        raise StartFilesError(f"COPY: {shown!r}: {text}", needs_image=True)
    for source in sources:
        if not _copied(context, source, f"{place}/"):
            text = f"COPY: {shown!r}: no file of the folder is {source!r}"
            raise StartFilesError(text, needs_image=any(mark in source for mark in "*?["))


def _copied(context: Tree, source: str, place: str) -> Tree:
    """Return the files that one source gives: a folder's content, or a file in or as the place."""
    source = posixpath.normpath(source).lstrip("/")
    if source in context and context[source].kind is not FileKind.FOLDER:
        into = place.endswith(("/", "/."))
        path = posixpath.join(place, posixpath.basename(source)) if into else place
        return {posixpath.normpath(path): context[source]}
    below = "" if source == "." else f"{source}/"
    return {
        posixpath.normpath(posixpath.join(place, name.removeprefix(below))): one
        for name, one in context.items()
        if name.startswith(below)
    }


def _instructions(dockerfile: str, *, strictly: bool = False) -> list[list[str]]:
    """Return the words of each instruction; what does not parse as words is left out, or refused.

    Raises:
        StartFilesError: A line is no words, and it is read strictly.

    """
    found: list[list[str]] = []
    for line in dockerfile.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            if strictly:
                text = f"{line[:_SHOWN_CHARACTERS]!r}: {error}"
                raise StartFilesError(text, needs_image=True) from error
            continue
        if words:
            found.append([words[0].upper(), *words[1:]])
    return found
