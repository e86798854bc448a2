"""Detects the format of a path and reads its tasks, or surveys what is wrong with them."""

from collections.abc import Iterator
from pathlib import Path

from penstock.envs.tasks.harbor.folder import MalformedTaskError
from penstock.envs.tasks.harbor.read import DEFAULT_OPTIONS, ReadOptions
from penstock.envs.tasks.readers.folders import FolderSource
from penstock.envs.tasks.readers.source import TaskCollection
from penstock.envs.tasks.readers.swe import SUFFIXES, SweSource
from penstock.envs.tasks.source import TaskCandidate


def open_sources(path: Path, options: ReadOptions = DEFAULT_OPTIONS) -> Iterator[TaskCollection]:
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
