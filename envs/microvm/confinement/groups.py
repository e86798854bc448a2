"""Manages the control groups (cgroups) of machines, where this process may create any.

They limit a machine's memory (including kernel memory) and processes, and give it one CPU share.

Version 1 has a hierarchy per controller, and a machine gets a group in each, below this process's
own group. Version 2 has one hierarchy, and allows groups with controllers only below a group
without processes. Groups are therefore created below this process's own group if that is the root,
and otherwise next to it, if its parent was delegated (systemd: `Delegate=yes` with
`DelegateSubgroup=`).

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
"""Minimum age in seconds of groups to sweep."""
_REMOVE_PAUSES_S = (0.002,) * 10 + (0.02,) * 20
"""Seconds between attempts to remove a group; 0.42 s in all.

The processes of a machine end shortly after the first process of their namespace, and a group with
processes cannot be removed."""
_numbers = itertools.count()


class CgroupLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on what one machine may use of the host."""

    memory_bytes: int
    """Memory of all its processes, including page tables and other memory of the host's kernel."""
    num_processes: int


class MachineCgroups:
    """Control groups of one machine.

    Args:
        folders: Folder of the group of each controller; several controllers may share one.
        joined_by: Name of the file to which a process writes "0" to join the group.

    """

    def __init__(self, folders: Mapping[str, Path], joined_by: str) -> None:
        self.folders = dict.fromkeys(folders.values())
        self.files = [str(folder / joined_by) for folder in self.folders]

    async def remove(self) -> None:
        """Remove the groups when the machine's last process has ended, or leave them to a sweep."""
        for pause_s in _REMOVE_PAUSES_S:
            if not self.try_remove():
                return
            await asyncio.sleep(pause_s)

    def try_remove(self) -> bool:
        """Remove the groups that are empty; return whether any are left."""
        for folder in list(self.folders):
            with contextlib.suppress(OSError):
                folder.rmdir()
            if not folder.exists():
                del self.folders[folder]
        return bool(self.folders)


class CgroupParent:
    """Place where control groups of machines can be created.

    Args:
        folders: Parent folder of the groups of each controller.
        is_v2: Whether the folders belong to the single hierarchy of version 2.

    """

    def __init__(self, folders: Mapping[str, Path], *, is_v2: bool) -> None:
        self.folders, self.is_v2 = folders, is_v2

    def make(self, bound: CgroupLimits) -> MachineCgroups:
        """Create the groups of one machine.

        Raises:
            OSError: The kernel refuses.

        """
        name = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        made = {controller: home / name for controller, home in self.folders.items()}
        group = MachineCgroups(made, "cgroup.procs" if self.is_v2 else "tasks")
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

    def _settings(self, bound: CgroupLimits) -> list[tuple[str, str, str]]:
        memory = "memory.max" if self.is_v2 else "memory.limit_in_bytes"
        return [
            ("memory", memory, str(bound.memory_bytes)),
            ("pids", "pids.max", str(bound.num_processes)),
        ]

    def sweep(self) -> None:
        """Remove the groups that killed processes of Penstock left behind."""
        # Safe next to running processes: the kernel refuses to remove groups in use, and the age
        # spares groups that were created a moment ago and have no process yet.
        for home in dict.fromkeys(self.folders.values()):
            for folder in home.glob(f"{_PREFIX}*"):
                owner = _LEFT_BEHIND.fullmatch(folder.name)
                if owner is None or Path("/proc", owner[1]).exists():
                    continue
                with contextlib.suppress(OSError):
                    if time.time() - folder.stat().st_mtime > _LEFT_BEHIND_S:
                        folder.rmdir()


def find_cgroup_parent(
    groups: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/proc/self/mountinfo")
) -> CgroupParent | None:
    """Return where this process may create groups, or None.

    Args:
        groups: File in which the kernel lists the groups of this process.
        mounts: File in which the kernel lists the mounted hierarchies.

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
        return CgroupParent(v1, is_v2=False)
    candidates = [found["cgroup2"], found["cgroup2"].parent] if "cgroup2" in found else []
    for folder in candidates:
        if enabled := _enabled(folder):
            return CgroupParent({name: folder for name in enabled}, is_v2=True)
    return None


def _below_mount(mounted: str, controller: str, path: str) -> Path | None:
    """Return the folder of a group in the hierarchy of a controller, or None if not mounted."""
    # A container may see its own group as the root of the mount: see proc_pid_mountinfo(5).
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
    # By trying: read-only mounts and namespaces are not visible in the permissions.
    probe = home / f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def _enabled(folder: Path) -> list[str]:
    """Enable the controllers for groups below a delegated folder; return those that it has."""
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
