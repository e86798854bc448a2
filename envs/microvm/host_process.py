"""Starts, observes and kills the host process that contains a guest."""

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from penstock.envs.microvm.confinement.groups import MachineCgroups
from penstock.envs.sandbox import SandboxTimeout

HANG_GRACE_S = 10.0
"""Extra seconds granted on a loaded host; beyond this the machine counts as hung."""
LAST_WORDS_BYTES = 2048
_TICKS = os.sysconf("SC_CLK_TCK")
OUTPUT_BYTES_MAX = 1 << 16
"""Maximum output of a machine's host process; further writes of it fail."""


@contextlib.contextmanager
def _pinned(cpu: int | None) -> Iterator[None]:
    """Pin this thread to one CPU during the block; processes started in it inherit the pinning."""
    if cpu is None:
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _bounded_output() -> int:
    """Return an in-memory file whose size is fixed, for the output of a machine."""
    # A pipe would have to be read, and a plain file could fill the host's disk.
    words = os.memfd_create("guest-output", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(words, OUTPUT_BYTES_MAX)
    fcntl.fcntl(words, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return words


class HostProcess:
    """Bubblewrap process that contains a guest; killing it ends everything inside.

    Bubblewrap asks the kernel to kill it when the thread that started it ends, so that even a
    process killed by SIGKILL leaves no orphans. Start machines from a thread that lives as long.
    """

    ended_s: ClassVar[float] = 0.0
    """CPU seconds of all machines that this process has ended."""

    def __init__(
        self,
        argv: Sequence[str],
        cpu: int | None,
        pass_fds: Sequence[int],
        group: MachineCgroups | None = None,
    ) -> None:
        self.group = group
        self._words = _bounded_output()
        try:
            with _pinned(cpu):
                self._popen = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=self._words,
                    stderr=self._words,
                    env={},
                    pass_fds=pass_fds,
                    process_group=0,  # Ctrl-C in a terminal must not reach machines.
                )
        except OSError:
            os.close(self._words)
            raise

    @property
    def pid(self) -> int:
        """Process id of the outermost process."""
        return self._popen.pid

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL or SIGTERM ended the process or the program inside it."""
        # Bubblewrap reports a program that signal n ended as exit status 128 + n.
        return self._popen.poll() in {
            code for n in (signal.SIGKILL, signal.SIGTERM) for code in (-n, 128 + n)
        }

    def last_words(self) -> str:
        """Return the last output of the machine and how it ended, for error texts."""
        code = self._popen.poll()
        text = b""
        if self._words >= 0:
            text = os.pread(self._words, OUTPUT_BYTES_MAX, 0).rstrip(b"\0")[-LAST_WORDS_BYTES:]
        state = "its connection closed" if code is None else f"it exited with {code}"
        return f"the machine ended: {state}. {text.decode(errors='replace').strip()}".strip()

    async def kill(self) -> None:
        """Kill and reap the process; return when the kernel has removed it.

        Raises:
            SandboxTimeout: The process survives SIGKILL for `HANG_GRACE_S`.

        """
        # Before the kill: afterwards nobody can read the CPU time of the processes inside.
        if self._popen.poll() is None:
            HostProcess.ended_s += inner_processor_s(self.pid)
        self._popen.send_signal(signal.SIGKILL)
        if self._words >= 0:
            # Before waiting, which needs a descriptor: this may be the last one available.
            os.close(self._words)
            self._words = -1
        await self._wait_for_exit()
        if self.group is not None:
            await self.group.remove()

    async def _wait_for_exit(self) -> None:
        if self._popen.poll() is not None:
            return
        loop = asyncio.get_running_loop()
        gone = loop.create_future()
        pidfd = os.pidfd_open(self._popen.pid)
        loop.add_reader(pidfd, lambda: gone.done() or gone.set_result(None))
        try:
            async with asyncio.timeout(HANG_GRACE_S):
                await gone
        except TimeoutError:
            raise SandboxTimeout(
                f"process {self.pid} still exists {HANG_GRACE_S:g} s after SIGKILL"
            ) from None
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self._popen.wait()


def process_tree(pid: int) -> list[int]:
    """Return the ids of a process and all its living descendants."""
    found = [pid]
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in listing.read_text().split():
            found += process_tree(int(child))
    return found


def inner_processor_s(pid: int) -> float:
    """Return the CPU seconds of all descendants of a process.

    The processes of a killed machine end with their PID namespace and are not waited for by their
    parents, so the kernel does not add their time to this process's children. Processes inside that
    ended earlier are included in the counters of their parents, in clock ticks.
    """
    total_s = 0.0
    with contextlib.suppress(OSError):  # the processes may be ending by themselves
        for inner in process_tree(pid)[1:]:
            fields = Path(f"/proc/{inner}/stat").read_text().rpartition(")")[2].split()
            # User and system time of the process and of its reaped children, from proc(5). Ticks
            # are 10 ms: for short processes only the scheduler's nanoseconds count anything.
            own, ended = (sum(map(int, fields[at : at + 2])) / _TICKS for at in (11, 13))
            exact = int(Path(f"/proc/{inner}/schedstat").read_text().split()[0]) / 1e9
            total_s += max(own, exact) + ended
    return total_s
