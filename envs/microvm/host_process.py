"""The host process that holds a guest: started, listened to, killed."""

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from penstock.envs.microvm.confinement.groups import MachineGroup
from penstock.envs.sandbox import SandboxTimeout

HANG_GRACE_S = 10.0
"""Extra time for a loaded host; beyond this the machine counts as hung."""
LAST_WORDS_BYTES = 2048
_TICKS = os.sysconf("SC_CLK_TCK")
OUTPUT_BYTES_MAX = 1 << 16
"""Kept of what a machine's process prints; the rest of it fails to be written."""


@contextlib.contextmanager
def _pinned(cpu: int | None) -> Iterator[None]:
    """Keep this thread on one CPU, for the processes that it starts; they inherit it at birth."""
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
    """Return a file in memory that has its size already and cannot grow."""
    words = os.memfd_create("guest-output", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(words, OUTPUT_BYTES_MAX)
    fcntl.fcntl(words, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return words


class HostProcess:
    """The bubblewrap process that holds a guest; killing it ends everything inside.

    Bubblewrap asks the kernel to kill it when the thread that started it ends (a process that
    dies, even by kill -9, thus leaves no orphan): start machines from a thread that stays.
    """

    ended_s: ClassVar[float] = 0.0
    """Processor seconds of all machines that this process has ended."""

    def __init__(
        self,
        argv: Sequence[str],
        cpu: int | None,
        pass_fds: Sequence[int],
        group: MachineGroup | None = None,
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
                    process_group=0,  # Ctrl-C in a terminal is not meant for it.
                )
        except OSError:
            os.close(self._words)
            raise

    @property
    def pid(self) -> int:
        """Id of the outermost process."""
        return self._popen.pid

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL or SIGTERM ended it, or what it holds (then it ends with 128 + n)."""
        return self._popen.poll() in {
            code for n in (signal.SIGKILL, signal.SIGTERM) for code in (-n, 128 + n)
        }

    def last_words(self) -> str:
        """Return the end of what the machine printed, and how it ended."""
        code = self._popen.poll()
        text = b""
        if self._words >= 0:
            text = os.pread(self._words, OUTPUT_BYTES_MAX, 0).rstrip(b"\0")[-LAST_WORDS_BYTES:]
        state = "its connection closed" if code is None else f"it exited with {code}"
        return f"the machine ended: {state}. {text.decode(errors='replace').strip()}".strip()

    async def kill(self) -> None:
        """Kill and reap; returns when the kernel has taken the process away.

        Raises:
            SandboxTimeout: It has not: the host is stuck.

        """
        if self._popen.poll() is None:
            HostProcess.ended_s += inner_processor_s(self.pid)
        self._popen.send_signal(signal.SIGKILL)
        if self._words >= 0:
            os.close(self._words)  # First: waiting takes a descriptor, which may be the last one.
            self._words = -1
        await self._gone()
        if self.group is not None:
            await self.group.remove()

    async def _gone(self) -> None:
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
            raise SandboxTimeout(f"process {self.pid} survives SIGKILL") from None
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self._popen.wait()


def process_tree(pid: int) -> list[int]:
    """Return a process and all its living descendants."""
    found = [pid]
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in listing.read_text().split():
            found += process_tree(int(child))
    return found


def inner_processor_s(pid: int) -> float:
    """Return the processor seconds of all below a process, which it will not be told of.

    A killed machine's processes end with their namespace, unseen by their parents. Of processes in
    it that ended before, their parents know, in ticks of the kernel's.
    """
    total_s = 0.0
    with contextlib.suppress(OSError):  # It may be ending by itself.
        for inner in process_tree(pid)[1:]:
            fields = Path(f"/proc/{inner}/stat").read_text().rpartition(")")[2].split()
            own, ended = (sum(map(int, fields[at : at + 2])) / _TICKS for at in (11, 13))
            exact = int(Path(f"/proc/{inner}/schedstat").read_text().split()[0]) / 1e9
            total_s += max(own, exact) + ended
    return total_s
