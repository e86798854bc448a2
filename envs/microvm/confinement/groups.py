"""Control groups of machines, where this process may make some.

They bound memory, the kernel's part included, and processes, and give each machine one share.

Version 1 has a hierarchy for each controller, and a machine a group in each, below this process's
own. Version 2 has one, and takes groups with controllers only where no process is: below this
process's own group if that is the root, else beside it, if its parent was delegated (systemd:
`Delegate=yes` with `DelegateSubgroup=`).

Source: Linux, Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst.
"""

import asyncio
import contextlib
import itertools
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

CONTROLLERS = ("memory", "pids", "cpu")
_PREFIX = "penstock-"
_LEFT_BEHIND = re.compile(rf"{_PREFIX}(\d+)-\d+")
_LEFT_BEHIND_S = 60.0
_REMOVE_PAUSES_S = (0.002,) * 10 + (0.02,) * 20
"""Its processes end with their namespace's first one, but not at once."""
_numbers = itertools.count()


class GroupBound(msgspec.Struct, frozen=True, kw_only=True):
    """What one machine may use of the host."""

    memory_bytes: int
    """All of its processes', page tables and other memory of the host's kernel included."""
    num_processes: int


class MachineGroup:
    """The groups of one machine, empty.

    Args:
        folders: By controller; several may be the same.
        joined_by: The file of a folder that takes "0" from a process that joins.

    """

    def __init__(self, folders: Mapping[str, Path], joined_by: str) -> None:
        self.folders = dict.fromkeys(folders.values())
        self.files = [str(folder / joined_by) for folder in self.folders]

    async def remove(self) -> None:
        """Remove the groups once the machine's last process has ended; else a later sweep does."""
        for pause_s in _REMOVE_PAUSES_S:
            if not self.try_remove():
                return
            await asyncio.sleep(pause_s)

    def try_remove(self) -> bool:
        """Remove what is empty; return whether something is left."""
        for folder in list(self.folders):
            with contextlib.suppress(OSError):
                folder.rmdir()
            if not folder.exists():
                del self.folders[folder]
        return bool(self.folders)


class GroupHome:
    """Where groups of machines can be made.

    Args:
        folders: By controller.
        is_v2: Whether it is the one hierarchy of version 2.

    """

    def __init__(self, folders: Mapping[str, Path], *, is_v2: bool) -> None:
        self.folders, self.is_v2 = folders, is_v2

    def make(self, bound: GroupBound) -> MachineGroup:
        """Make one machine's groups.

        Raises:
            OSError: The kernel refuses.

        """
        name = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        made = {controller: home / name for controller, home in self.folders.items()}
        group = MachineGroup(made, "cgroup.procs" if self.is_v2 else "tasks")
        try:
            for folder in dict.fromkeys(made.values()):
                folder.mkdir()
            for controller, file, value in self._settings(bound):
                if controller in made:
                    (made[controller] / file).write_text(value)
        except OSError:
            for folder in made.values():
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise
        return group

    def _settings(self, bound: GroupBound) -> list[tuple[str, str, str]]:
        memory = "memory.max" if self.is_v2 else "memory.limit_in_bytes"
        return [
            ("memory", memory, str(bound.memory_bytes)),
            ("pids", "pids.max", str(bound.num_processes)),
        ]

    def sweep(self) -> None:
        """Remove what processes that were killed left behind; groups in use cannot be removed."""
        for home in dict.fromkeys(self.folders.values()):
            for folder in home.glob(f"{_PREFIX}*"):
                owner = _LEFT_BEHIND.fullmatch(folder.name)
                if owner is None or Path("/proc", owner[1]).exists():
                    continue
                with contextlib.suppress(OSError):
                    if time.time() - folder.stat().st_mtime > _LEFT_BEHIND_S:
                        folder.rmdir()


def find_home(
    groups: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/proc/self/mountinfo")
) -> GroupHome | None:
    """Return where this process may make groups; None if nowhere.

    Args:
        groups: The process's own groups, as the kernel lists them.
        mounts: The mounted hierarchies likewise.

    """
    try:
        own, mounted = groups.read_text(), mounts.read_text()
    except OSError:
        return None
    found: dict[str, Path] = {}
    for line in own.splitlines():
        _, names, path = line.split(":", 2)
        for controller in names.split(",") if names else ["cgroup2"]:
            if folder := _below_mount(mounted, controller, path):
                found[controller] = folder
    v1 = {name: found[name] for name in CONTROLLERS if name in found and _can_make(found[name])}
    if v1:
        return GroupHome(v1, is_v2=False)
    candidates = [found["cgroup2"], found["cgroup2"].parent] if "cgroup2" in found else []
    for folder in candidates:
        if enabled := _enabled(folder):
            return GroupHome({name: folder for name in enabled}, is_v2=True)
    return None


def _below_mount(mounted: str, controller: str, path: str) -> Path | None:
    """Return the folder of a group in the hierarchy of a controller."""
    for line in mounted.splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(), right.split()[:3]
        is_it = kind == "cgroup2" if controller == "cgroup2" else kind == "cgroup"
        if is_it and (controller == "cgroup2" or controller in options.split(",")):
            root, mount_point = fields[3], fields[4]
            inside = path.removeprefix(root.rstrip("/")) if path.startswith(root) else "/"
            return Path(mount_point + inside)
    return None


def _can_make(home: Path) -> bool:
    probe = home / f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def _enabled(folder: Path) -> list[str]:
    """Return the controllers that groups below a folder have; it must have been delegated."""
    try:
        offered = (folder / "cgroup.controllers").read_text().split()
        control = folder / "cgroup.subtree_control"
        missing = set(CONTROLLERS) & set(offered) - set(control.read_text().split())
        if missing:
            control.write_text(" ".join(f"+{name}" for name in sorted(missing)))
        enabled = set(control.read_text().split())
    except OSError:
        return []
    return [name for name in CONTROLLERS if name in enabled] if _can_make(folder) else []
