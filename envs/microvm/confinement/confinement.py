"""Starts the host processes of machines with every confinement measure that this host supports."""

import contextlib
import functools
import itertools
import logging
import os
import platform
import socket
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

import msgspec

from penstock.envs.microvm.confinement.groups import (
    CONTROLLERS,
    CgroupLimits,
    CgroupParent,
    MachineCgroups,
    find_cgroup_parent,
)
from penstock.envs.microvm.host_process import HostProcess
from penstock.envs.microvm.images.assets import find_bubblewrap
from penstock.envs.sandbox import SandboxDied

log = logging.getLogger(__name__)

UID_FIRST = 1 << 30
"""First of 2^30 user ids for machines: far above those of accounts, and below 2^31."""
_PROCESS_BITS, _MACHINE_BITS = 20, 10
NUM_PROCESSES_MAX = 1024
"""Maximum processes of one machine on the host; in a guest a user runs at most 256."""
MARGIN_MIB = 16
"""Memory for files of the host beyond the guest's memory."""
_PROBE_S = 10.0
_numbers = itertools.count()


class Measure(StrEnum):
    """Restriction of a machine's host process."""

    LIMITS = "limits"
    """Resource limits: descriptors, file size, core dumps, message queues, locked memory."""
    CALL_FILTER = "call_filter"
    """Filter of the host's system calls (`filters.py`)."""
    NO_USER_NAMESPACES = "no_user_namespaces"
    """Ban on creating user namespaces inside."""
    OWN_USER = "own_user"
    """Separate non-root user id of the host for each machine; only root can assign one."""
    MEMORY_GROUP = "memory_group"
    """Limit on memory that includes the memory of the host's kernel."""
    PIDS_GROUP = "pids_group"
    """Limit on the number of processes."""
    CPU_GROUP = "cpu_group"
    """One share of the CPUs for all processes of a machine together."""


_GROUPS = "root with cgroup v1, or a delegated cgroup v2 (docs/sandboxes.md)"
HOW_TO_GET: Mapping[Measure, str] = {
    Measure.CALL_FILTER: "x86-64 and a kernel with seccomp filters",
    Measure.NO_USER_NAMESPACES: "bubblewrap 0.8 or newer",
    Measure.OWN_USER: "start as root, where other users may make user namespaces",
    Measure.MEMORY_GROUP: _GROUPS,
    Measure.PIDS_GROUP: _GROUPS,
    Measure.CPU_GROUP: _GROUPS,
}
"""What a host needs for each measure; `LIMITS` works everywhere."""


class HostMeasures(msgspec.Struct, frozen=True):
    """Measures that this host supports."""

    measures: tuple[Measure, ...]
    groups: CgroupParent | None


Program = Callable[[int, Mapping[str, str]], list[str]]
"""Function of the descriptor of the guest's line and of file paths by kind, which returns the
command that runs inside."""


@functools.cache
def find_host_measures(launcher: Path) -> HostMeasures:
    """Find the measures that this host supports by trying each one."""
    # Tried instead of looked up: containers and security modules may forbid what the kernel has.
    found = [Measure.LIMITS]
    if platform.machine() == "x86_64" and Path("/proc/sys/kernel/seccomp").is_dir():
        found.append(Measure.CALL_FILTER)
    if _runs([], ["--disable-userns"]):
        found.append(Measure.NO_USER_NAMESPACES)
    if os.geteuid() == 0 and _runs([str(launcher), "-u", str(_next_user())], []):
        found.append(Measure.OWN_USER)
    groups = find_cgroup_parent()
    if groups is not None:
        groups.sweep()
        found += [Measure(f"{name}_group") for name in CONTROLLERS if name in groups.folders]
    missing = [measure for measure in Measure if measure not in found]
    if missing:
        log.info("machines on this host run without %s", ", ".join(missing))
    return HostMeasures(tuple(found), groups)


def _runs(prefix: list[str], options: list[str]) -> bool:
    """Return whether bubblewrap runs a program with a command prefix and options."""
    inside = ["--unshare-all", "--unshare-user", *options, "--ro-bind", "/", "/", "--", "/bin/true"]
    argv = [*prefix, find_bubblewrap(), *inside]
    try:
        done = subprocess.run(argv, check=False, capture_output=True, timeout=_PROBE_S, env={})
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _next_user() -> int:
    """Return a user id that no other running machine of this host is likely to have."""
    # Process id and counter: processes of Penstock do not coordinate the ids that they assign.
    process = os.getpid() % (1 << _PROCESS_BITS)
    return UID_FIRST + (process << _MACHINE_BITS) + next(_numbers) % (1 << _MACHINE_BITS)


class Confinement:
    """Starts the host processes of one kind of machine.

    Args:
        launcher: Path of the program compiled from `launcher.c`.
        files: Files of the host that the machine reads, by kind. The process inherits them open and
            has no path to them, so its user does not need access to their folders.
        options: Bubblewrap options for mounts and environment.
        calls: Filter of system calls as a BPF program.
        memory_mib: Memory of the guest plus what its host process needs.
        copies: Files that also appear as a copy inside: path inside, by kind.
        own_user: Whether the machine may have a separate user id; False if it must access files of
            this process's user.
        keeps_addresses: Whether to disable address randomization. User-mode Linux would do that by
            executing itself again, which fails here because it has no path to its own program.
        writable: Kinds of the files that it may also write.

    """

    def __init__(  # noqa: PLR0913
        self,
        launcher: Path,
        files: Mapping[str, Path],
        options: Sequence[str],
        *,
        calls: bytes,
        memory_mib: int,
        copies: Mapping[str, str] = MappingProxyType({}),
        own_user: bool = True,
        keeps_addresses: bool = False,
        writable: Collection[str] = (),
    ) -> None:
        self._writable = frozenset(writable)
        self.files, self._copies = dict(files), dict(copies)
        self._launcher, self._calls = str(launcher), calls
        self._host = find_host_measures(launcher)
        self._measures = set(self._host.measures)
        if not own_user:
            self._measures.discard(Measure.OWN_USER)
        self._bytes_max = memory_mib << 20
        self._bound = CgroupLimits(
            memory_bytes=self._bytes_max, num_processes=NUM_PROCESSES_MAX + 16
        )
        self._keeps_addresses = keeps_addresses
        self.options = [
            *("--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"),
            *(("--disable-userns",) if self.has(Measure.NO_USER_NAMESPACES) else ()),
            *("--uid", "1000", "--gid", "1000", "--cap-drop", "ALL", "--clearenv"),
            *options,
        ]

    @property
    def in_force(self) -> list[str]:
        """Names of the measures that apply to its machines."""
        return [str(measure) for measure in Measure if self.has(measure)]

    def has(self, measure: Measure) -> bool:
        """Return whether a measure applies to its machines."""
        return measure in self._measures

    def start(
        self, program: Program, cpu: int | None, pass_fds: Sequence[int] = ()
    ) -> tuple[HostProcess, socket.socket]:
        """Start the host process of a machine.

        Args:
            program: Command that runs inside.
            cpu: Host CPU to pin it to.
            pass_fds: More descriptors that it inherits under the same numbers.

        Returns:
            The process, and the host's end of the socket to the guest agent.

        Raises:
            SandboxDied: The host cannot start a process, or a file of the machine is gone.

        """
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            try:
                line, end = socket.socketpair()
                ours.enter_context(line)
                theirs.enter_context(end)
                fds = {name: self._open(name, path, theirs) for name, path in self.files.items()}
                calls = self._filter(theirs)
                group = self._group(ours)
                inside = program(end.fileno(), {k: f"/proc/self/fd/{n}" for k, n in fds.items()})
                argv = [
                    *self._launched(group.files if group else []),
                    *(find_bubblewrap(), *self.options, *self._copied(fds)),
                    *(("--seccomp", str(calls[0])) if calls else ()),
                    *("--", *inside),
                ]
                passed = [end.fileno(), *fds.values(), *calls, *pass_fds]
                process = HostProcess(argv, cpu, passed, group)
            except OSError as error:
                raise SandboxDied(f"cannot start a machine: {error}") from error
            ours.pop_all()  # started: keep the line open and the group in place
            return process, line

    def _copied(self, fds: Mapping[str, int]) -> list[str]:
        """Return bubblewrap's options for copies, which it makes from open descriptors."""
        return [
            word
            for name, path in self._copies.items()
            for word in ("--perms", "0555", "--ro-bind-data", str(fds[name]), path)
        ]

    def _open(self, kind: str, path: Path, until: contextlib.ExitStack) -> int:
        access = os.O_RDWR if kind in self._writable else os.O_RDONLY
        fd = os.open(path, access | os.O_CLOEXEC)
        until.callback(os.close, fd)
        return fd

    def _filter(self, until: contextlib.ExitStack) -> list[int]:
        """Return the descriptor from which bubblewrap reads the filter, if there is one."""
        if not self.has(Measure.CALL_FILTER):
            return []
        # The filter fits the pipe's buffer (64 KiB), so this write does not wait for a reader.
        reads, writes = os.pipe2(os.O_CLOEXEC)
        until.callback(os.close, reads)
        with open(writes, "wb") as pipe:  # noqa: PTH123 - a descriptor
            pipe.write(self._calls)
        return [reads]

    def _group(self, until: contextlib.ExitStack) -> MachineCgroups | None:
        if self._host.groups is None:
            return None
        group = self._host.groups.make(self._bound)
        until.callback(group.try_remove)
        return group

    def _launched(self, groups: list[str]) -> list[str]:
        size = self._bytes_max
        return [
            self._launcher,
            *(part for group in groups for part in ("-g", group)),
            *("-f", str(size), *(("-a",) if self._keeps_addresses else ())),
            *self._own_user(),
        ]

    def _own_user(self) -> list[str]:
        if not self.has(Measure.OWN_USER):
            return []
        return ["-p", str(NUM_PROCESSES_MAX), "-u", str(_next_user())]
