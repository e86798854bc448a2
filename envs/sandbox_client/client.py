"""One request to a sandbox host or the scheduler, its errors, and what a lease specifies."""

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
"""A retry at once would end the same way."""

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
    """What a remote sandbox needs of an actor's `Context`."""

    async def request(
        self, service: str, message: Message, *, deadline_s: float, reason: str = ""
    ) -> Message:
        """Send and wait for the answer; raises RemoteCallError and DeadlineError."""
        ...

    async def sleep(self, duration_s: float) -> None:
        """Sleep."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back."""
        ...


def host_service(host: str) -> str:
    """Return the service that one host serves alone."""
    return f"sandbox.{host}"


async def call(
    client: SandboxClient, service: str, message: Message, expected: type[M], deadline_s: float
) -> M:
    """Send one request and return an answer of the expected type.

    Raises:
        SandboxTimeout: No answer in time.
        SandboxError: The host's own error, or an answer of another type.

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
    """Return a sandbox's error as it travels: its kind, its type's name, its words."""
    kind = next(kind for error_type, kind in _KINDS.items() if isinstance(error, error_type))
    return RemoteError(kind=kind, error=f"{type(error).__name__}: {error}")


def _from_remote(service: str, error: RemoteCallError) -> SandboxError:
    name, _, words = error.text.partition(": ")
    error_type = _BY_NAME.get(name)
    if error_type is None:
        return SandboxError(f"{service}: {error}")
    return error_type(f"{service}: {words}")


class SavedSandbox(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint, and where it is."""

    checkpoint_id: str
    host: str


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The group that a machine belongs to: all of its machines are placed on one host."""

    group_id: str
    num_machines: int
    holder: str = ""
    """Whose quota it counts against; empty: the machine's own holder."""


class LeaseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a machine is requested and held."""

    holder: str
    lease_s: float = 60.0
    """The host reaps the machine this long after the last request."""
    acquire_wait_s: float = 120.0
    """Longest wait for a host with room."""
    image_digest: str = ""
    """Image layer above the base image; empty: the host's own choice for all."""
    machine: MachineNeeds = MachineNeeds()
    """What it must have (`Task.machine`)."""
    retry_delay_s: float = 0.2
    margin_s: float = 15.0
    """Time that a host has to answer, beyond what the operation itself may take: more than it
    waits for a machine that hangs (`HANG_GRACE_S`), so that it can report that one's end."""
    group: GroupSpec | None = None
    """The scheduler places it on a host; else any host with room answers."""
    is_grading: bool = False
    """It may use the slots that hosts reserve for grading."""
    takes_over: bool = False
    """End the machine that the same holder leased before."""
    avoid_host: str = ""
    """Prefer any other host, for `lease.AVOID_S`."""
    branch_of: SavedSandbox | None = None
    """Resume from a checkpoint, on the host that holds it."""
