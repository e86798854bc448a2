"""Detects the format of a path and reads its tasks, or surveys what is wrong with them."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from penstock.envs.tasks.harbor.folder import MalformedTaskError
from penstock.envs.tasks.harbor.read import DEFAULT_OPTIONS, ReadOptions, read_harbor
from penstock.envs.tasks.harbor.write import TASK_FILE
from penstock.envs.tasks.readers.swe import SUFFIXES, SweSource
from penstock.envs.tasks.readers.terminal_bench import YAML_FILE, read_terminal_bench
from penstock.envs.tasks.source import TaskCandidate, TaskEntry

FOLDERS_MAX = 100_000
DEPTH_MAX = 8


class FolderSource:
    """Task folders at any depth below a root, including the root; they are never nested.

    They are Harbor's (`task.toml`) or terminal-bench 1's (`task.yaml`).
    """

    format = "folders"

    def __init__(self, root: Path, options: ReadOptions) -> None:
        self._root, self._options = root, options

    def entries(self) -> Iterator[TaskEntry]:
        """Yield the tasks, by name.

        Raises:
            MalformedTaskError: There are too many folders.

        """
        for number, (folder, names, files) in enumerate(os.walk(self._root)):
            if number >= FOLDERS_MAX:
                raise MalformedTaskError(f"{self._root}: more than {FOLDERS_MAX} folders")
            names.sort()
            place = Path(folder)
            read = read_harbor if TASK_FILE in files else None
            if read is None and YAML_FILE in files:
                read = read_terminal_bench
            if read is not None:
                names.clear()
                name = str(place.relative_to(self._root)) if place != self._root else place.name
                yield TaskEntry(name=name, read=partial(read, place, self._options))
            elif len(place.relative_to(self._root).parts) >= DEPTH_MAX:
                names.clear()
            names[:] = [name for name in names if not name.startswith(".")]


def open_sources(
    path: Path, options: ReadOptions = DEFAULT_OPTIONS
) -> Iterator[FolderSource | SweSource]:
    """Yield the sources of a path: one for a file; those of all files and task folders in a folder.

    Raises:
        MalformedTaskError: The path does not exist, or the file has an unknown format.

    """
    if path.is_file():
        if path.suffix not in SUFFIXES:
            text = f"expected a folder of tasks, or a file that ends in {' or '.join(SUFFIXES)}"
            raise MalformedTaskError(f"{path}: {text}")
        yield SweSource(path, options)
        return
    if not path.is_dir():
        raise MalformedTaskError(f"{path}: expected task folders, or a file of tasks")
    yield FolderSource(path, options)
    for one in sorted(path.iterdir()):
        if one.suffix in SUFFIXES and one.is_file():
            yield SweSource(one, options)


def read_tasks(path: Path, options: ReadOptions = DEFAULT_OPTIONS) -> list[TaskCandidate]:
    """Read all tasks of a path.

    Raises:
        MalformedTaskError: A task is malformed, two have the same id, or there is none.

    """
    candidates: dict[str, TaskCandidate] = {}
    for source in open_sources(path, options):
        for entry in source.entries():
            candidate = entry.read()
            task_id = candidate.task.task_id
            if candidates.setdefault(task_id, candidate) is not candidate:
                words = f"metadata.penstock.task_id: {task_id!r} is another task's"
                raise MalformedTaskError(f"{path / entry.name}: {words}")
    if not candidates:
        text = "expected task folders, each with a task.toml or task.yaml"
        raise MalformedTaskError(f"{path}: {text}, or files of {' or '.join(SUFFIXES)}")
    return list(candidates.values())
