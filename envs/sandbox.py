"""The sandbox contract: what the agent harness and the graders may do with a machine.

To add a backend, write a class that implements `SandboxBackend`, add its line to
`envs/backends.py`, and pass `tests/contract/sandbox/check_sandbox.py`. A backend declares only
capabilities that it has; requiring a missing one raises `CapabilityMissing`.
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
"""Working directory of the agent; relative paths start here."""
WORK_NAMES = tuple(
    f"/{name}" for name in ("work", "app", "workspace", "testbed", "repo", "code", "project", "src")
)
"""Names of the working directory in the base image: those that tasks of common sets give it."""


class SandboxError(PenstockError, RuntimeError):
    """Base of all sandbox errors: infrastructure failures, except for `SandboxKilled`."""


class SandboxDied(SandboxError, ConnectionError):
    """The machine ended while it was in use; the error has its last output."""


class SandboxKilled(SandboxDied):
    """The machine ended or hung while others on its host did not: its own programs caused it."""


class SandboxTimeout(SandboxError, TimeoutError):
    """The machine did not answer within the command's own timeout plus a grace period."""


class SandboxFileError(SandboxError, OSError):
    """A path in the guest is absent, not a regular file, or cannot be written."""


class SandboxRequestError(SandboxError, ValueError):
    """The guest agent refused a request; the error has its reason."""


class CapabilityMissing(SandboxError, NotImplementedError):
    """A backend lacks a required capability; the error lists those that it has."""


class BackendUnavailable(SandboxError, LookupError):
    """A backend is unknown, refused, or not installed; the error says how to get it."""


class ImageAbsent(SandboxError, LookupError):
    """A host does not have a requested image and cannot get it."""


class NeedsRefused(SandboxError, ValueError):
    """A host offers less than a task's machines need; the error names both."""


class IsolationClass(StrEnum):
    """Boundary between guest code and the host, strongest first."""

    HARDWARE_VM = "hardware_vm"
    """Separate kernel on virtual hardware, isolated by the processor."""
    EMULATED_VM = "emulated_vm"
    """Separate kernel on an emulated processor, in one unprivileged process."""
    USER_MODE_KERNEL = "user_mode_kernel"
    """Separate kernel that runs as an unprivileged process inside namespaces."""
    PROCESS = "process"
    """Namespaces only: the host's kernel serves the guest's system calls."""


class Capability(StrEnum):
    """Feature that a backend may declare."""

    COLD_BOOT = "cold_boot"
    OWN_KERNEL = "own_kernel"
    RAM_SNAPSHOT = "ram_snapshot"
    """Machines start as copies of one that has already booted."""
    FORK = "fork"
    """Several machines may resume from one checkpoint."""
    CHECKPOINT = "checkpoint"
    """A running machine can be saved and then continues."""
    LAYERS = "layers"
    """Machines may have an image layer above the base image (`envs/microvm/images/layers.py`)."""
    NETWORK = "network"
    """Programs can reach allowed hosts, and only those, through an audited proxy
    (`envs/egress`)."""


class Sandbox(Protocol):
    """Single-use machine. Calls may overlap; each has its own deadline."""

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
        """Run a program with stdin `/dev/null` and return when its first process exits.

        Args:
            argv: Program and arguments; no shell is involved.
            timeout_s: Seconds after which its process group is killed and `timed_out` is set.
            cwd: Working directory in the guest.
            env: Variables added to the default environment (PATH, HOME, LC_ALL, TERM).
            output_bytes_max: Bytes kept of each output stream; at most 1 MiB.
            op_key: Idempotency key, at most 64 bytes; a repeated key does not run the program
                again.

        Raises:
            SandboxDied: The machine ended.
            SandboxTimeout: The machine hangs: no answer some seconds after `timeout_s`.

        """
        ...

    async def read_file(self, path: str, bytes_max: int) -> bytes:
        """Return the first `bytes_max` bytes of a regular file."""
        ...

    async def write_files(self, files: Mapping[str, bytes], *, keeps_modes: bool = True) -> None:
        """Write whole files and their parent folders, owned by the guest's user.

        New files have the mode 0644. Those that are there have, too, or keep theirs, and may then
        be read-only.
        """
        ...

    async def list_files(self, root: str) -> list[str]:
        """Return the regular files below `root`, relative to it, sorted; at most 20,000."""
        ...

    async def close(self) -> None:
        """End the machine and everything in it; a repeated call does nothing."""
        ...


@runtime_checkable
class NetworkedSandbox(Sandbox, Protocol):
    """A sandbox of a backend that declares `NETWORK`."""

    async def allow_egress(self, rules: Sequence[str]) -> None:
        """Let programs started from now on reach some hosts; allowed once per machine.

        Args:
            rules: Allow-list entries: `name:port`, `*.name:port` or `name:port@address`.

        Raises:
            SandboxRequestError: A rule is malformed, or other rules were set before.

        """
        ...

    async def egress_attempts(self) -> list[EgressAttempt]:
        """Return what programs tried to reach, allowed or not; similar attempts share an entry."""
        ...


class VerifierRun(msgspec.Struct, frozen=True, kw_only=True):
    """Test program, and how the code under test is separated from it."""

    argv: list[str]
    timeout_s: float
    output_bytes_max: int = 65536
    peer: list[str] = []
    """Command of the code under test, run as a separate process by the guest's user. The verifier's
    user then runs `argv`, and descriptor 3 of both is one socket. Empty: `argv` runs the code."""
    covers: list[tuple[str, str]] = []
    """Pairs (file, pattern): the file is mounted over every match of the pattern, visible only to
    the code under test. Path components of a pattern may contain `*`, `?` and `[...]`."""


@runtime_checkable
class VerifyingSandbox(Sandbox, Protocol):
    """A sandbox whose guest has a second user, for tests and their results."""

    async def verify(self, run: VerifierRun, *, op_key: str = "") -> ExecResult:
        """Run a test program in the working directory; otherwise like `Sandbox.exec`."""
        ...

    async def write_verifier_files(self, files: Mapping[str, bytes]) -> None:
        """Write whole files and new parent folders that only the verifier's user can read."""
        ...


class NetworkedMachine(NetworkedSandbox, Protocol):
    """A networked sandbox on the host that runs it."""

    async def allow_egress(self, rules: Sequence[str], *, allows_addresses: bool = False) -> None:
        """See `NetworkedSandbox.allow_egress`.

        Args:
            rules: Allow-list entries.
            allows_addresses: Whether the host's operator permits rules that name an address.

        Raises:
            SandboxRequestError: A rule is malformed or names an address without permission, or
                other rules were set before.

        """
        ...


class Machine(Sandbox, Protocol):
    """A sandbox on the host that runs it."""

    @property
    def alive(self) -> bool:
        """Whether its guest is still connected."""
        ...


class SandboxBackend(Protocol):
    """Factory of sandboxes."""

    name: str
    isolation_class: IsolationClass
    capabilities: frozenset[Capability]

    async def start(self, *, cpu: int | None = None, timeout_s: float = 10.0) -> Machine:
        """Start one machine, ready for its first `exec`; `cpu` pins it to one host CPU."""
        ...


class SavingMachine(Machine, Protocol):
    """A machine of a backend that declares `CHECKPOINT`."""

    async def checkpoint(self, folder: Path) -> None:
        """Save the running machine, including commands in flight; it is paused meanwhile.

        Args:
            folder: Path that must not exist yet; on failure nothing is left there.

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
        """Return a machine that resumes from a checkpoint, with its own clock and identity.

        A command that was running when the machine was saved continues. Repeating it with its
        `op_key` waits for that command instead of running it twice.

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
            f"it offers {', '.join(sorted(backend.capabilities))}"
        )


def verifying(sandbox: Sandbox) -> VerifyingSandbox:
    """Return a sandbox that has a verifier's user; raise `CapabilityMissing` if it has none."""
    if not isinstance(sandbox, VerifyingSandbox):
        raise CapabilityMissing(
            f"machines of backend {sandbox.info.backend!r} have one user, and none for the verifier"
        )
    return sandbox


def networked(sandbox: Sandbox) -> NetworkedSandbox:
    """Return a sandbox that has network access; raise `CapabilityMissing` if it has none."""
    if not isinstance(sandbox, NetworkedSandbox):
        raise CapabilityMissing(
            f"machines of backend {sandbox.info.backend!r} have no network access"
        )
    return sandbox
