"""The host process that holds a guest: started, listened to, killed."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from penstock.envs.sandbox import SandboxDied, SandboxTimeout

HANG_GRACE_S = 10.0
"""Extra time for a loaded host; beyond this the machine counts as hung."""
LAST_WORDS_BYTES = 2048


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


class HostProcess:
    """The bubblewrap process that holds a guest; killing it ends everything inside.

    Bubblewrap asks the kernel to kill it when the thread that started it ends (a process that
    dies, even by kill -9, thus leaves no orphan): start machines from a thread that stays.
    """

    def __init__(self, argv: Sequence[str], cpu: int | None, pass_fds: Sequence[int]) -> None:
        self._words = os.memfd_create("guest-output", os.MFD_CLOEXEC)
        try:
            with _pinned(cpu):
                self._popen = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=self._words,
                    stderr=self._words,
                    env={},
                    pass_fds=pass_fds,
                )
        except OSError:
            os.close(self._words)
            raise

    @property
    def pid(self) -> int:
        """Id of the outermost process."""
        return self._popen.pid

    def last_words(self) -> str:
        """Return the end of what the machine printed, and how it ended."""
        code = self._popen.poll()
        text = b""
        if self._words >= 0:
            size = os.fstat(self._words).st_size
            text = os.pread(self._words, LAST_WORDS_BYTES, max(0, size - LAST_WORDS_BYTES))
        state = "its connection closed" if code is None else f"it exited with {code}"
        return f"the machine ended: {state}. {text.decode(errors='replace').strip()}".strip()

    async def kill(self) -> None:
        """Kill and reap; returns when the kernel has taken the process away.

        Raises:
            SandboxTimeout: It has not: the host is stuck.

        """
        self._popen.send_signal(signal.SIGKILL)
        if self._words >= 0:
            os.close(self._words)  # First: waiting takes a descriptor, which may be the last one.
            self._words = -1
        await self._gone()

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


def start_process(
    command: Callable[[int], list[str]], cpu: int | None, pass_fds: Sequence[int] = ()
) -> tuple[HostProcess, socket.socket]:
    """Start a machine's process.

    Args:
        command: Makes the command line, given the descriptor of the guest's end of a socket.
        cpu: Host CPU to pin it to.
        pass_fds: Further descriptors that it inherits, under the same numbers.

    Returns:
        The process, and our end of the socket.

    Raises:
        SandboxDied: The host has no room for a process, or its program is gone.

    """
    try:
        ours, theirs = socket.socketpair()
    except OSError as error:
        raise SandboxDied(f"no machine could be started: {error}") from error
    with theirs:
        try:
            argv = command(theirs.fileno())
            return HostProcess(argv, cpu, [theirs.fileno(), *pass_fds]), ours
        except OSError as error:
            ours.close()
            raise SandboxDied(f"no machine could be started: {error}") from error


def process_tree(pid: int) -> list[int]:
    """Return a process and all its living descendants."""
    found = [pid]
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in listing.read_text().split():
            found += process_tree(int(child))
    return found
