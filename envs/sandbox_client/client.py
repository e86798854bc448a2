"""Sends requests to sandbox hosts and the scheduler, maps errors, and defines lease settings."""

from typing import Protocol, TypeVar

import msgspec

from penstock.envs.sandbox import (
    ImageAbsent,
    NeedsRefused,
    SandboxDied,
    SandboxError,
    SandboxFileError,
    SandboxKilled,
    SandboxRequestError,
    SandboxTimeout,
)
from penstock.messages.base import Message
from penstock.messages.errors import BusError, DeadlineError, RemoteCallError
from penstock.messages.rpc import RemoteError, RemoteErrorKind
from penstock.messages.task import MachineNeeds

ACQUIRE_SERVICE = "sandbox.acquire"
SCHEDULER_SERVICE = "scheduler"


class SandboxBusyError(SandboxError, BlockingIOError):
    """No host has room for one more machine now; retry later."""


REFUSALS = (SandboxBusyError, ImageAbsent, NeedsRefused)
"""Errors that an immediate retry would only repeat."""

# Order matters: the first matching type decides, so subclasses come before their bases.
_KINDS: dict[type[SandboxError], RemoteErrorKind] = {
    SandboxBusyError: RemoteErrorKind.BUSY,
    ImageAbsent: RemoteErrorKind.FAILED,
    SandboxKilled: RemoteErrorKind.GONE,
    NeedsRefused: RemoteErrorKind.FAILED,
    SandboxDied: RemoteErrorKind.GONE,
    SandboxTimeout: RemoteErrorKind.GONE,
    SandboxFileError: RemoteErrorKind.INVALID,
    SandboxRequestError: RemoteErrorKind.INVALID,
    SandboxError: RemoteErrorKind.FAILED,
}
_BY_NAME = {error_type.__name__: error_type for error_type in _KINDS}
M = TypeVar("M", bound=Message)


class SandboxClient(Protocol):
    """The part of an actor's `Context` that a remote sandbox needs."""

    async def request(
        self, service: str, message: Message, *, deadline_s: float, reason: str = ""
    ) -> Message:
        """Send a request and return its answer; raise RemoteCallError or DeadlineError."""
        ...

    async def sleep(self, duration_s: float) -> None:
        """Sleep for `duration_s` seconds."""
        ...

    def monotonic(self) -> float:
        """Return the seconds of a clock that never goes backward."""
        ...


def host_service(host: str) -> str:
    """Return the name of the service that reaches one particular host."""
    return f"sandbox.{host}"


async def call(
    client: SandboxClient, service: str, message: Message, expected: type[M], deadline_s: float
) -> M:
    """Send one request and return an answer of the expected type.

    Raises:
        SandboxTimeout: No answer within `deadline_s`.
        SandboxError: The error that the host reported, or an answer of another type.

    """
    reason = type(message).__name__
    try:
        reply = await client.request(service, message, deadline_s=deadline_s, reason=reason)
    except RemoteCallError as error:
        raise _from_remote(service, error) from error
    except (DeadlineError, BusError) as error:
        raise SandboxTimeout(f"{service} does not answer: {error}") from error
    if not isinstance(reply, expected):
        raise SandboxError(f"{service}: expected {expected.__name__}, got {type(reply).__name__}")
    return reply


def to_remote_error(error: SandboxError) -> RemoteError:
    """Return a sandbox's error in wire format: its kind, and the name of its type with its text."""
    kind = next(kind for error_type, kind in _KINDS.items() if isinstance(error, error_type))
    return RemoteError(kind=kind, error=f"{type(error).__name__}: {error}")


def _from_remote(service: str, error: RemoteCallError) -> SandboxError:
    name, _, words = error.text.partition(": ")
    error_type = _BY_NAME.get(name)
    if error_type is None:
        return SandboxError(f"{service}: {error}")
    return error_type(f"{service}: {words}")


class SavedSandbox(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoint of a machine, and the host that holds it."""

    checkpoint_id: str
    host: str


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Group of machines that the scheduler places on one host."""

    group_id: str
    num_machines: int
    holder: str = ""
    """Holder whose quota the group counts against; empty: the holder of the machine."""


class LeaseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a machine is requested and held."""

    holder: str
    lease_s: float = 60.0
    """Seconds after the last request at which the host ends the machine."""
    acquire_wait_s: float = 120.0
    """Maximum seconds to wait for a host with room."""
    image_digest: str = ""
    """Digest of the image layer above the base image; empty: the default image of the host."""
    machine: MachineNeeds = MachineNeeds()
    """Minimum size and isolation of the machine (`Task.machine`)."""
    retry_delay_s: float = 0.2
    margin_s: float = 15.0
    """Seconds that a host has to answer, on top of the operation's own time limit. Longer than the
    host's wait for a hung machine (`HANG_GRACE_S`), so that it can still report the hang."""
    group: GroupSpec | None = None
    """Group through which the scheduler chooses the host; None: any host with room answers."""
    is_grading: bool = False
    """Whether the machine may use slots that hosts reserve for grading."""
    takes_over: bool = False
    """Whether to end the machine that the same holder leased before."""
    avoid_host: str = ""
    """Host to use only if no other one answers within `lease.AVOID_S`."""
    branch_of: SavedSandbox | None = None
    """Checkpoint to resume from, on the host that holds it."""
