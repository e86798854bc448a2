"""A sandbox on another host, spoken to by requests.

```
 lease_sandbox ──AcquireSandbox──▶ any host with room ──SandboxLeased──▶ RemoteSandbox
                                                                          │ exec, read, write, list
                    sandbox.<host>  ◀──────── every further request ──────┘ + renewal while held
```
"""

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from penstock.envs.sandbox import (
    WORK_DIR,
    ExecResult,
    ImageAbsent,
    SandboxDied,
    SandboxError,
    SandboxFileError,
    SandboxRequestError,
    SandboxTimeout,
)
from penstock.messages.base import Message
from penstock.messages.errors import BusError, DeadlineError, RemoteCallError
from penstock.messages.generation import Ack, RemoteError, RemoteErrorKind
from penstock.messages.machine import (
    AcquireSandbox,
    AllowEgress,
    CommandFinished,
    EgressRead,
    ExecCommand,
    FileRead,
    FilesListed,
    GroupPlaced,
    ListFiles,
    PlaceGroup,
    ReadEgress,
    ReadFile,
    ReleaseGroup,
    ReleaseSandbox,
    SandboxLeased,
    SandboxSaved,
    SaveSandbox,
    WriteFiles,
)
from penstock.messages.rollout import EgressAttempt, SandboxRecord

ACQUIRE_SERVICE = "sandbox.acquire"
FLEET_SERVICE = "fleet"
SAVE_S_MAX = 60.0
AVOID_S = 6.0
"""A host that did not answer is avoided so long; the scheduler forgets dead ones sooner."""


class SandboxBusyError(SandboxError, BlockingIOError):
    """No host has room for one more machine now; ask again later."""


_KINDS: dict[type[SandboxError], RemoteErrorKind] = {
    SandboxBusyError: RemoteErrorKind.BUSY,
    ImageAbsent: RemoteErrorKind.FAILED,
    SandboxDied: RemoteErrorKind.GONE,
    SandboxTimeout: RemoteErrorKind.GONE,
    SandboxFileError: RemoteErrorKind.INVALID,
    SandboxRequestError: RemoteErrorKind.INVALID,
    SandboxError: RemoteErrorKind.FAILED,
}
_BY_NAME = {error_type.__name__: error_type for error_type in _KINDS}
M = TypeVar("M", bound=Message)


class Asker(Protocol):
    """What a remote sandbox needs of its user's `Context`."""

    async def request(
        self, service: str, message: Message, *, deadline_s: float, reason: str = ""
    ) -> Message:
        """Ask and wait; raises RemoteCallError and DeadlineError."""
        ...

    async def sleep(self, duration_s: float) -> None:
        """Sleep."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back."""
        ...


class LeaseTerms(msgspec.Struct, frozen=True, kw_only=True):
    """How a machine is asked for and held."""

    holder: str
    lease_s: float = 60.0
    """The host reaps the machine this long after the last request."""
    acquire_wait_s: float = 120.0
    """Longest wait for a host with room."""
    image_digest: str = ""
    """Image layer above the base image; empty: the host's own choice for all."""
    retry_delay_s: float = 0.2
    margin_s: float = 10.0
    """Time that a host has to answer, on top of what the operation itself may take."""
    group: "GroupTerms | None" = None
    """Ask the fleet's scheduler for a host; else any host with room answers."""
    is_grading: bool = False
    """It may have a machine that hosts keep from rollouts."""
    takes_over: bool = False
    """End the machine that the same holder leased before."""
    branch_of: "SavedSandbox | None" = None
    """Go on from a checkpoint, on the host that holds it."""


class SavedSandbox(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint, and where it is."""

    checkpoint_id: str
    host: str


class GroupTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The group that a machine belongs to: all of its machines are placed on one host."""

    group_id: str
    num_machines: int
    holder: str = ""
    """Whose quota it counts against; empty: the machine's own holder."""


class RemoteSandbox:
    """The `Sandbox` protocol over requests; an answer that does not come means a lost machine."""

    def __init__(self, asker: Asker, leased: SandboxLeased, terms: LeaseTerms) -> None:
        """Speak to the host that leased the machine."""
        self.info: SandboxRecord = leased.sandbox
        self._asker = asker
        self._leased = leased
        self._terms = terms
        self._op_numbers = itertools.count()
        self._op_prefix = hashlib.blake2s(leased.lease_id.encode(), digest_size=8).hexdigest()
        """A copy of a machine remembers the keys of the one it was: each lease has its own."""

    async def exec(  # noqa: PLR0913 - the protocol asks for them
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str = WORK_DIR,
        env: Mapping[str, str] | None = None,
        output_bytes_max: int = 65536,
        op_key: str = "",
    ) -> ExecResult:
        """Run a program; it runs once, however often the request is delivered."""
        command = ExecCommand(
            lease_id=self._leased.lease_id,
            op_key=op_key or f"{self._op_prefix}-{next(self._op_numbers)}",
            argv=list(argv),
            cwd=cwd,
            env=dict(env or {}),
            timeout_s=timeout_s,
            output_bytes_max=output_bytes_max,
        )
        done = await self._ask(command, CommandFinished, within_s=timeout_s)
        return ExecResult(
            exit_code=done.exit_code,
            stdout=done.stdout,
            stderr=done.stderr,
            truncated=done.truncated,
            timed_out=done.timed_out,
            duration_ms=done.duration_ms,
        )

    async def read_file(self, path: str, bytes_max: int) -> bytes:
        """Return the first `bytes_max` bytes of a regular file."""
        message = ReadFile(lease_id=self._leased.lease_id, path=path, num_bytes_max=bytes_max)
        return (await self._ask(message, FileRead)).data

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write whole files, parents included."""
        message = WriteFiles(lease_id=self._leased.lease_id, files=dict(files))
        await self._ask(message, Ack)

    async def list_files(self, root: str) -> list[str]:
        """Return the regular files below `root`, relative to it, sorted."""
        message = ListFiles(lease_id=self._leased.lease_id, root=root)
        return (await self._ask(message, FilesListed)).paths

    async def allow_egress(self, rules: Sequence[str]) -> None:
        """See `NetworkedSandbox.allow_egress`."""
        await self._ask(AllowEgress(lease_id=self._leased.lease_id, rules=list(rules)), Ack)

    async def egress_attempts(self) -> list[EgressAttempt]:
        """See `NetworkedSandbox.egress_attempts`."""
        return (await self._ask(ReadEgress(lease_id=self._leased.lease_id), EgressRead)).attempts

    async def save(self, checkpoint_id: str) -> SavedSandbox:
        """Save the machine while it runs; `LeaseTerms.branch_of` goes on from there.

        Raises:
            SandboxError: Its backend cannot, or failed; the machine goes on.

        """
        message = SaveSandbox(lease_id=self._leased.lease_id, checkpoint_id=checkpoint_id)
        saved = await self._ask(message, SandboxSaved, within_s=SAVE_S_MAX)
        return SavedSandbox(checkpoint_id=saved.checkpoint_id, host=saved.host)

    async def close(self) -> None:
        """Give the machine back; a host that cannot be told reaps it by itself."""
        with contextlib.suppress(SandboxError):
            await self._ask(ReleaseSandbox(lease_id=self._leased.lease_id), Ack)

    async def renew(self, deadline_s: float) -> None:
        """Tell the host that the lease is still held; raises `SandboxDied` where it is not."""
        message = AcquireSandbox(
            lease_id=self._leased.lease_id,
            holder=self._terms.holder,
            lease_s=self._terms.lease_s,
        )
        service = host_service(self._leased.host)
        await ask(self._asker, service, message, SandboxLeased, deadline_s)

    async def _ask(self, message: Message, expected: type[M], *, within_s: float = 0.0) -> M:
        service = host_service(self._leased.host)
        deadline_s = within_s + self._terms.margin_s
        return await ask(self._asker, service, message, expected, deadline_s)


@contextlib.asynccontextmanager
async def lease_sandbox(
    asker: Asker, lease_id: str, terms: LeaseTerms
) -> AsyncGenerator[RemoteSandbox]:
    """Hold a machine for the time of the block; it is renewed meanwhile and destroyed after.

    Raises:
        SandboxBusyError: No host had room for `terms.acquire_wait_s`.
        SandboxError: The host failed.

    """
    try:
        sandbox = RemoteSandbox(asker, await _acquire(asker, lease_id, terms), terms)
    except ImageAbsent:
        await _give_room_back(asker, terms)
        raise
    renewal = asyncio.create_task(keep_renewed(asker, sandbox.renew, terms))
    try:
        yield sandbox
    finally:
        renewal.cancel()
        await asyncio.gather(renewal, return_exceptions=True)
        await sandbox.close()
        if terms.group is not None and terms.group.num_machines == 1:
            await _give_room_back(asker, terms)


async def _give_room_back(asker: Asker, terms: LeaseTerms) -> None:
    """Tell the scheduler what it would learn from hosts' reports, or by waiting."""
    if terms.group is not None:
        message = ReleaseGroup(group_id=terms.group.group_id)
        with contextlib.suppress(SandboxError):
            await ask(asker, FLEET_SERVICE, message, Ack, terms.margin_s)


async def _acquire(asker: Asker, lease_id: str, terms: LeaseTerms) -> SandboxLeased:
    message = AcquireSandbox(
        lease_id=lease_id,
        holder=terms.holder,
        lease_s=terms.lease_s,
        is_placed=terms.group is not None or terms.branch_of is not None,
        checkpoint_id=terms.branch_of.checkpoint_id if terms.branch_of else "",
        group_id=terms.group.group_id if terms.group else "",
        image_digest=terms.image_digest,
        is_grading=terms.is_grading,
        takes_over=terms.takes_over,
    )

    async def place(avoid_host: str) -> str:
        return await _place(asker, terms, avoid_host)

    return await lease_where_placed(asker, terms, place, message, SandboxLeased, "sandbox")


async def lease_where_placed(  # noqa: PLR0913, PLR0917 - a request, and where it goes
    asker: Asker,
    terms: LeaseTerms,
    place: Callable[[str], Awaitable[str]],
    wanted: Message,
    expected: type[M],
    what: str,
) -> M:
    """Ask the host that a placement names, as often as it takes, and return its answer.

    Args:
        asker: Who asks.
        terms: How long, how often.
        place: Takes a host to avoid, returns the one to ask; "" for any with room.
        wanted: The request.
        expected: Its answer's type.
        what: For the error.

    Raises:
        SandboxBusyError: No host gave one for `terms.acquire_wait_s`.
        SandboxError: The host failed.

    """
    give_up_at = asker.monotonic() + terms.acquire_wait_s
    avoid, avoid_until = "", 0.0
    while True:
        host = ""
        try:
            host = await place(avoid if asker.monotonic() < avoid_until else "")
            service = host_service(host) if host else ACQUIRE_SERVICE
            return await ask(asker, service, wanted, expected, terms.margin_s)
        except (SandboxBusyError, SandboxTimeout) as error:
            now = asker.monotonic()
            if host and isinstance(error, SandboxTimeout):
                avoid, avoid_until = host, now + AVOID_S
            if now + terms.retry_delay_s > give_up_at:
                words = f"no {what} within {terms.acquire_wait_s:g} s: {error}"
                raise SandboxBusyError(words) from error
        await asker.sleep(terms.retry_delay_s)


async def _place(asker: Asker, terms: LeaseTerms, avoid_host: str) -> str:
    """Return the host to acquire from; empty: whichever has room answers."""
    if terms.branch_of is not None:
        return terms.branch_of.host
    if terms.group is None:
        return ""
    return await place_group(asker, terms.group, terms, avoid_host=avoid_host)


async def place_group(
    asker: Asker, group: GroupTerms, terms: LeaseTerms, *, avoid_host: str = ""
) -> str:
    """Return the host that has room for a group: the same one to all of its machines.

    Raises:
        SandboxBusyError: None has, or the quota is used up.
        SandboxTimeout: The scheduler does not answer.

    """
    wanted = PlaceGroup(
        group_id=group.group_id,
        holder=group.holder or terms.holder,
        num_machines=group.num_machines,
        image_digest=terms.image_digest,
        lease_s=terms.lease_s,
        avoid_host=avoid_host,
        is_grading=terms.is_grading,
    )
    return (await ask(asker, FLEET_SERVICE, wanted, GroupPlaced, terms.margin_s)).host


def host_service(host: str) -> str:
    """Return the service that one host serves alone."""
    return f"sandbox.{host}"


async def keep_renewed(
    asker: Asker, renew: Callable[[float], Awaitable[object]], terms: LeaseTerms
) -> None:
    """Renew until cancelled, or until all is gone: its users meet that by themselves.

    Gone is what its host says is gone, and what no host has answered for during a whole lease.

    Args:
        asker: Who holds the lease.
        renew: Asks once, with this deadline; raises `SandboxDied` where nothing is left.
        terms: How long a lease is.

    """
    period_s = pause_s = terms.lease_s / 3
    held_until = asker.monotonic() + terms.lease_s
    while asker.monotonic() + pause_s < held_until:
        await asker.sleep(pause_s)
        try:
            await renew(min(period_s, terms.margin_s))
        except SandboxDied:
            return
        except SandboxError:
            pause_s = min(period_s, terms.retry_delay_s)
        else:
            pause_s, held_until = period_s, asker.monotonic() + terms.lease_s


async def ask(
    asker: Asker, service: str, message: Message, expected: type[M], deadline_s: float
) -> M:
    """Ask once and return an answer of the expected type.

    Raises:
        SandboxTimeout: No answer in time.
        SandboxError: The host's own error, or an answer of another type.

    """
    reason = type(message).__name__
    try:
        reply = await asker.request(service, message, deadline_s=deadline_s, reason=reason)
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
