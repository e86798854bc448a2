"""`penstock tasks get NAME@VERSION`: a data set of a Harbor registry, as folders.

A registry is a `registry.json` in a folder or git repository: data sets with a name, a version and
tasks, each with a path in a git repository at a commit. No code of a repository is run: git only
writes the files of one commit, without hooks, filters and submodules.

Source: `RegistryTaskConfig` and `DatasetSpec` of Harbor.
"""

import argparse
import os
import shutil
import subprocess
import tempfile
from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec

from penstock.infra.output import print_result
from penstock.messages.errors import CodecError, NotFoundError
from penstock.messages.reading.parsing import parse_json

REGISTRY_FILE = "registry.json"
GIT_S_MAX = 600.0
REGISTRY_BYTES_MAX = 64 << 20
_Commit = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{40}|[0-9a-f]{64}|HEAD)\Z")]
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,199}\Z")]


class DatasetTask(msgspec.Struct, frozen=True):
    """One task of a data set."""

    name: _Name
    path: str
    git_url: str = ""
    """Repository; empty for the registry's own folder."""
    git_commit_id: _Commit = "HEAD"


class Dataset(msgspec.Struct, frozen=True):
    """One data set of a registry."""

    name: str
    version: str
    tasks: list[DatasetTask]


def get_tasks(arguments: argparse.Namespace) -> int:
    """Write the tasks of a data set as folders below `-o`."""
    name, _, version = arguments.dataset.partition("@")
    with tempfile.TemporaryDirectory(prefix="penstock-get-") as scratch:
        clones = _Clones(Path(scratch))
        registry = clones.folder(arguments.registry, "HEAD")
        found = _dataset(registry, name, version)
        arguments.output.mkdir(parents=True, exist_ok=True)
        for task in found.tasks:
            root = clones.folder(task.git_url, task.git_commit_id) if task.git_url else registry
            _copy(root, task, arguments.output / task.name.replace("/", "__"))
    told = {"dataset": f"{found.name}@{found.version}", "num_tasks": len(found.tasks)}
    print_result(told, as_json=arguments.json)
    return 0


def _dataset(registry: Path, name: str, version: str) -> Dataset:
    path = registry / REGISTRY_FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise NotFoundError(f"{path}: expected a registry: {error}") from error
    if len(data) > REGISTRY_BYTES_MAX:
        raise CodecError(f"{path}: expected at most {REGISTRY_BYTES_MAX} bytes")
    sets: list[Dataset] = parse_json(data, list[Dataset], REGISTRY_FILE)
    named = [one for one in sets if one.name == name]
    chosen = [one for one in named if version in {"", one.version}]
    if len(chosen) != 1:
        there = ", ".join(f"{one.name}@{one.version}" for one in named or sets) or "none"
        raise NotFoundError(f"{name}@{version}: expected one of {there}")
    return chosen[0]


def _copy(root: Path, task: DatasetTask, place: Path) -> None:
    path = PurePosixPath(task.path)
    folder = root / path
    if path.is_absolute() or ".." in path.parts or folder.resolve() != root.resolve() / path:
        raise CodecError(f"{REGISTRY_FILE}: task {task.name}: path: leads out: {task.path!r}")
    if not folder.is_dir():
        raise NotFoundError(f"{REGISTRY_FILE}: task {task.name}: path: no folder {task.path!r}")
    if place.exists():
        raise NotFoundError(f"{place}: expected a new folder for task {task.name}")
    shutil.copytree(folder, place, symlinks=True, ignore=shutil.ignore_patterns(".git"))


class _Clones:
    """Commits of repositories, checked out as folders, each fetched once."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._folders: dict[tuple[str, str], Path] = {}

    def folder(self, url: str, commit: str) -> Path:
        """Return a local folder, or the files of a repository at a commit.

        Raises:
            NotFoundError: Git cannot get it.

        """
        if Path(url).is_dir() and not (Path(url) / ".git").exists():
            return Path(url)
        if (url, commit) not in self._folders:
            place = self._scratch / str(len(self._folders))
            _git("init", "-q", "--template=", str(place))
            _git("-C", str(place), "fetch", "-q", "--depth=1", "--", url, commit)
            _git("-C", str(place), "checkout", "-q", "FETCH_HEAD")
            self._folders[url, commit] = place
        return self._folders[url, commit]


def _git(*arguments: str) -> None:
    environment = {
        **os.environ,
        "GIT_ALLOW_PROTOCOL": "https:ssh:file",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_LFS_SKIP_SMUDGE": "1",
    }
    settings = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false")
    try:
        done = subprocess.run(
            ["git", *settings, *arguments],
            env=environment,
            capture_output=True,
            timeout=GIT_S_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotFoundError(f"git {arguments[0]}: {error}") from error
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip()[-400:]
        raise NotFoundError(f"git: {' '.join(arguments[-2:])}: {said}")
