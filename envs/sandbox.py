"""The one way to speak to a machine in which an agent works.

`tests/contract/check_sandbox.py` is the conformance suite: every implementation, local or remote,
real or fake, passes it.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from penstock.messages.errors import NotFoundError, PenstockError
from penstock.messages.machine import CommandFinished
from penstock.messages.rollout import SandboxRecord

WORKING_DIRECTORY = "/work"
"""Where a task's files lie; relative paths start here."""


class SandboxError(PenstockError, RuntimeError):
    """A machine refused or failed an operation."""


class SandboxLostError(SandboxError, ConnectionError):
    """The machine is gone or does not answer; nothing of it is left."""


class SandboxBusyError(SandboxError, BlockingIOError):
    """There is no room for one more machine now; ask again later."""


class SandboxFileError(SandboxError, NotFoundError):
    """The path is no regular file that can be read or written, or is larger than the bound."""


class Sandbox(Protocol):
    """One single-use machine. Every operation is bounded, and raises as said above."""

    @property
    def record(self) -> SandboxRecord:
        """What kind of machine it is."""
        ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str = WORKING_DIRECTORY,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 10.0,
        output_bytes_max: int = 65536,
    ) -> CommandFinished:
        """Run a program to its leader's exit; at the timeout its process group is killed.

        A program that does not exist is exit code 127 with words on stderr.
        """
        ...

    async def read_file(self, path: str, *, num_bytes_max: int = 1 << 20) -> bytes:
        """Return a file's bytes.

        Raises:
            SandboxFileError: No such regular file, or it is larger than the bound.

        """
        ...

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write files, parents included."""
        ...

    async def list_files(self, root: str = WORKING_DIRECTORY) -> list[str]:
        """Return the paths of regular files below `root`, relative to it, sorted."""
        ...

    async def close(self) -> None:
        """Destroy the machine; idempotent, never raises SandboxLostError."""
        ...
