"""Collections of task folders: Harbor's (`task.toml`) and terminal-bench 1's (`task.yaml`)."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from penstock.envs.tasks.harbor.folder import MalformedTaskError
from penstock.envs.tasks.harbor.read import ReadOptions, read_harbor
from penstock.envs.tasks.harbor.write import TASK_FILE
from penstock.envs.tasks.readers.source import TaskEntry
from penstock.envs.tasks.readers.terminal_bench import YAML_FILE, read_terminal_bench

FOLDERS_MAX = 100_000
DEPTH_MAX = 8


class FolderSource:
    """Task folders at any depth below a root, including the root; they are never nested."""

    format = "folders"

    def __init__(self, root: Path, options: ReadOptions) -> None:
        self._root, self._options = root, options

    def entries(self) -> Iterator[TaskEntry]:
        """See `TaskCollection.entries`."""
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
