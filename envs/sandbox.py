"""The sandbox contract: what the agent harness and the graders may do with a machine.

To add a backend: write a class that implements `SandboxBackend`, add its line to
`envs/backends.py`, and pass `tests/contract/sandbox/check_sandbox.py`. A backend declares only what
it can do: requiring an absent capability raises, and no backend silently replaces another.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from penstock.messages.errors import PenstockError
from penstock.messages.rollout import EgressAttempt, SandboxRecord
from penstock.messages.sandbox import ExecResult

WORK_DIR = "/work"
"""Where the agent works; relative paths start here."""


class SandboxError(PenstockError, RuntimeError):
    """Root of what a sandbox can raise: an infrastructure failure, except for `SandboxKilled`."""


class SandboxDied(SandboxError, ConnectionError):
    """The machine ended while it was in use; the text has its last words."""


class SandboxKilled(SandboxDied):
    """The machine ended or hung by itself, alone of all on its host: its programs' own doing."""


class SandboxTimeout(SandboxError, TimeoutError):
    """The machine did not answer in time, beyond the deadline of the command itself."""


class SandboxFileError(SandboxError, OSError):
    """A path in the guest is absent, not a regular file, or cannot be written."""


class SandboxRequestError(SandboxError, ValueError):
    """The guest agent refused a request; the text has its reason."""


class CapabilityMissing(SandboxError, NotImplementedError):
    """A backend lacks a required capability; the text lists what it has."""


class BackendUnavailable(SandboxError, LookupError):
    """A backend is unknown, refused, or not installed; the text says how to get it."""


class ImageAbsent(SandboxError, LookupError):
    """A host does not have a requested image and cannot get it."""


class NeedsRefused(SandboxError, ValueError):
    """A host offers less than a task's machines need; the text has both."""


class IsolationClass(StrEnum):
    """What stands between the guest's code and the host; the strongest first."""

    HARDWARE_VM = "hardware_vm"
    """Its own kernel on virtual hardware, isolated by the processor."""
    EMULATED_VM = "emulated_vm"
    """Its own kernel on an emulated processor, in one unprivileged process."""
    USER_MODE_KERNEL = "user_mode_kernel"
    """Its own kernel, as an unprivileged process inside namespaces."""
    PROCESS = "process"
    """Namespaces alone: the host's kernel answers the guest's system calls."""


class Capability(StrEnum):
    """What a backend may declare that it can do."""

    COLD_BOOT = "cold_boot"
    OWN_KERNEL = "own_kernel"
    RAM_SNAPSHOT = "ram_snapshot"
    """Machines start as copies of one that has booted."""
    FORK = "fork"
    """Several machines may resume from one checkpoint."""
    CHECKPOINT = "checkpoint"
    """A running machine can be saved, and continues."""
    LAYERS = "layers"
    """Machines may have an image layer above the base image (`envs/microvm/images/layers.py`)."""
    NETWORK = "network"
    """Allowed hosts can be reached through an audited proxy (`envs/egress`); nothing else can."""


class Sandbox(Protocol):
    """One single-use machine. Calls may overlap; each has its own deadline."""

    info: SandboxRecord

    async def exec(  # noqa: PLR0913
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str = WORK_DIR,
        env: Mapping[str, str] | None = None,
        output_bytes_max: int = 65536,
        op_key: str = "",
    ) -> ExecResult:
        """Run a program with stdin `/dev/null`, until its leader exits.

        Args:
            argv: Program and arguments; no shell.
            timeout_s: Then its process group is killed, and `timed_out` is set.
            cwd: Working directory in the guest.
            env: Added to the default environment (PATH, HOME, LC_ALL, TERM).
            output_bytes_max: Kept of each stream; at most 1 MiB.
            op_key: At most 64 bytes. A repeat with this key does not run again.

        Raises:
            SandboxDied: The machine ended.
            SandboxTimeout: The machine hangs: no answer some seconds after `timeout_s`.

        """
        ...

    async def read_file(self, path: str, bytes_max: int) -> bytes:
        """Return the first `bytes_max` bytes of a regular file."""
        ...

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write whole files, parents included, owned by the guest's user."""
        ...

    async def list_files(self, root: str) -> list[str]:
        """Return the regular files below `root`, relative to it, sorted; at most 20,000."""
        ...

    async def close(self) -> None:
        """End the machine and everything in it; repeating it does nothing."""
        ...


@runtime_checkable
class NetworkedSandbox(Sandbox, Protocol):
    """A sandbox of a backend that declares `NETWORK`."""

    async def allow_egress(self, rules: Sequence[str]) -> None:
        """Let programs started from now on reach some hosts; once per machine.

        Args:
            rules: Each `name:port`, `*.name:port` or `name:port@address`.

        Raises:
            SandboxRequestError: A rule is malformed, or others were set before.

        """
        ...

    async def egress_attempts(self) -> list[EgressAttempt]:
        """Return what programs tried to reach, allowed or not; similar attempts share a line."""
        ...


class VerifierRun(msgspec.Struct, frozen=True, kw_only=True):
    """A program of tests, and how the code under test is kept apart from it."""

    argv: list[str]
    timeout_s: float
    output_bytes_max: int = 65536
    peer: list[str] = []
    """The code under test as a program of its own, run by the guest's user; `argv` is then run by
    the verifier's user, and descriptor 3 of both is one socket. Empty: `argv` runs the code."""
    covers: list[tuple[str, str]] = []
    """(file, pattern): lies over every file that the pattern means, for the code under test alone.
    Components of a pattern may hold `*`, `?` and `[...]`."""


@runtime_checkable
class VerifyingSandbox(Sandbox, Protocol):
    """A sandbox whose guest has a second user, for tests and their results."""

    async def verify(self, run: VerifierRun, *, op_key: str = "") -> ExecResult:
        """Run a program of tests in the working directory, as `Sandbox.exec`."""
        ...

    async def write_verifier_files(self, files: Mapping[str, bytes]) -> None:
        """Write whole files that the verifier's user alone can read, as their new folders."""
        ...


class NetworkedMachine(NetworkedSandbox, Protocol):
    """A networked sandbox held where it runs."""

    async def allow_egress(self, rules: Sequence[str], *, allows_addresses: bool = False) -> None:
        """See `NetworkedSandbox.allow_egress`.

        Args:
            rules: As there.
            allows_addresses: Whether the host's operator lets them name addresses.

        Raises:
            SandboxRequestError: As there, or a rule names an address and may not.

        """
        ...


class Machine(Sandbox, Protocol):
    """A sandbox held where it runs."""

    @property
    def alive(self) -> bool:
        """Whether its guest still listens."""
        ...


class SandboxBackend(Protocol):
    """A way to start sandboxes."""

    name: str
    isolation_class: IsolationClass
    capabilities: frozenset[Capability]

    async def start(self, *, cpu: int | None = None, timeout_s: float = 10.0) -> Machine:
        """Boot one machine, ready for its first `exec`; `cpu` pins it to one host CPU."""
        ...


class SavingMachine(Machine, Protocol):
    """A machine of a backend that declares `CHECKPOINT`."""

    async def checkpoint(self, folder: Path) -> None:
        """Save the running machine, commands in flight included; it is paused meanwhile.

        Args:
            folder: Must not exist; holds the checkpoint afterwards, or nothing.

        """
        ...


class SavingBackend(SandboxBackend, Protocol):
    """A backend that declares `CHECKPOINT`, and `FORK` if `restore` may be called repeatedly."""

    async def start(self, *, cpu: int | None = None, timeout_s: float = 10.0) -> SavingMachine:
        """See `SandboxBackend.start`."""
        ...

    async def restore(
        self, folder: Path, *, cpu: int | None = None, timeout_s: float = 10.0
    ) -> SavingMachine:
        """Return a machine that resumes from a checkpoint, with its own clock and names.

        A command that ran when it was saved continues; a repeat with its `op_key` waits for its
        end and does not run it twice.

        Raises:
            SandboxFileError: The folder holds no complete checkpoint of this kind of machine.

        """
        ...


def require(backend: SandboxBackend, required: Iterable[Capability]) -> None:
    """Raise `CapabilityMissing` unless `backend` declares all of `required`."""
    missing = sorted(set(required) - backend.capabilities)
    if missing:
        raise CapabilityMissing(
            f"sandbox backend {backend.name!r} has no {', '.join(missing)}; "
            f"it has {', '.join(sorted(backend.capabilities))}"
        )


def verifying(sandbox: Sandbox) -> VerifyingSandbox:
    """Return a sandbox that has a verifier's user; raises `CapabilityMissing` if it has none."""
    if not isinstance(sandbox, VerifyingSandbox):
        raise CapabilityMissing(f"machines of {sandbox.info.backend!r} have one user")
    return sandbox


def networked(sandbox: Sandbox) -> NetworkedSandbox:
    """Return a sandbox that has network access; raises `CapabilityMissing` if it has none."""
    if not isinstance(sandbox, NetworkedSandbox):
        raise CapabilityMissing(f"machines of {sandbox.info.backend!r} have no network access")
    return sandbox
