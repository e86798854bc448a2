"""Client of sandbox hosts: leases a machine, renews the lease while it is used, and talks to it.

`SandboxClient` sends requests to hosts and the scheduler and maps their errors; `lease_sandbox`
places and holds one machine; `RemoteSandbox` implements the `Sandbox` protocol with requests to the
host that runs the machine.
"""

import asyncio
import contextlib
import hashlib
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from penstock.envs.sandbox import (
    WORK_DIR,
    ImageAbsent,
    NeedsRefused,
    SandboxDied,
    SandboxError,
    SandboxFileError,
    SandboxKilled,
    SandboxRequestError,
    SandboxTimeout,
    VerifierRun,
)
from penstock.messages.base import Message
from penstock.messages.errors import BusError, DeadlineError, RemoteCallError
from penstock.messages.requests.scheduler import GroupPlaced, PlaceGroup, ReleaseGroup
from penstock.messages.retries import RetryPolicy, with_retries
from penstock.messages.rollout import EgressAttempt, SandboxRecord
from penstock.messages.rpc import Ack, RemoteError, RemoteErrorKind
from penstock.messages.sandbox import (
    AcquireSandbox,
    AllowEgress,
    EgressRead,
    ExecCommand,
    ExecResult,
    FileRead,
    FilesListed,
    ListFiles,
    ReadEgress,
    ReadFile,
    ReleaseSandbox,
    SandboxLeased,
    SandboxSaved,
    SaveSandbox,
    WriteFiles,
    packed_name,
    unpacked_name,
)
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


SAVE_S_MAX = 60.0
"""Maximum seconds that saving a machine may take."""


class RemoteSandbox:
    """Sandbox on another host; a missing answer counts as a lost machine."""

    def __init__(self, client: SandboxClient, leased: SandboxLeased, spec: LeaseSpec) -> None:
        """Use a machine that a host has leased."""
        self.info: SandboxRecord = leased.sandbox
        self.host = leased.host
        self.guest_s = 0.0
        """Seconds that programs ran in the machine, without the time its host was starved of
        CPU."""
        self._client = client
        self._leased = leased
        self._spec = spec
        self._op_numbers = itertools.count()
        # A copy of a machine remembers the operation keys of its original: without a prefix per
        # lease, the copy would answer a new command with an old result.
        self._op_prefix = hashlib.blake2s(leased.lease_id.encode(), digest_size=8).hexdigest()

    async def exec(  # noqa: PLR0913 - the protocol requires them
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str = WORK_DIR,
        env: Mapping[str, str] | None = None,
        output_bytes_max: int = 65536,
        op_key: str = "",
    ) -> ExecResult:
        """Run a program; it runs once even if the request is delivered several times."""
        run = VerifierRun(argv=list(argv), timeout_s=timeout_s, output_bytes_max=output_bytes_max)
        result = await self._run(run, op_key, cwd, env or {})
        running_s = (result.duration_ms - result.starved_ms) / 1e3
        # The guest measures its own duration, so the number is untrusted: clamp it.
        self.guest_s += min(max(0.0, running_s), timeout_s)
        return result

    async def verify(self, run: VerifierRun, *, op_key: str = "") -> ExecResult:
        """Run a test program, separated from the code under test; otherwise like `exec`."""
        return await self._run(run, op_key, WORK_DIR, {})

    async def _run(
        self, run: VerifierRun, op_key: str, cwd: str, env: Mapping[str, str]
    ) -> ExecResult:
        command = ExecCommand(
            lease_id=self._leased.lease_id,
            op_key=op_key or f"{self._op_prefix}-{next(self._op_numbers)}",
            argv=[packed_name(argument) for argument in run.argv],
            cwd=cwd,
            env=dict(env),
            timeout_s=run.timeout_s,
            output_bytes_max=run.output_bytes_max,
            peer=run.peer,
            covers=run.covers,
        )
        return await self._call(command, ExecResult, within_s=run.timeout_s)

    async def read_file(self, path: str, bytes_max: int) -> bytes:
        """Return the first `bytes_max` bytes of a regular file."""
        message = ReadFile(
            lease_id=self._leased.lease_id, path=packed_name(path), num_bytes_max=bytes_max
        )
        return (await self._call(message, FileRead)).data

    async def write_files(self, files: Mapping[str, bytes], *, keeps_modes: bool = True) -> None:
        """Write whole files and their parent folders."""
        lease_id = self._leased.lease_id
        message = WriteFiles(lease_id=lease_id, files=_named(files), keeps_modes=keeps_modes)
        await self._call(message, Ack)

    async def write_verifier_files(self, files: Mapping[str, bytes]) -> None:
        """Write whole files that only the verifier's user can read."""
        lease_id = self._leased.lease_id
        message = WriteFiles(lease_id=lease_id, files=_named(files), is_verifier=True)
        await self._call(message, Ack)

    async def list_files(self, root: str) -> list[str]:
        """Return the regular files below `root`, relative to it, sorted."""
        message = ListFiles(lease_id=self._leased.lease_id, root=root)
        listed = await self._call(message, FilesListed)
        return [unpacked_name(path) for path in listed.paths]

    async def allow_egress(self, rules: Sequence[str]) -> None:
        """See `NetworkedSandbox.allow_egress`."""
        await self._call(AllowEgress(lease_id=self._leased.lease_id, rules=list(rules)), Ack)

    async def egress_attempts(self) -> list[EgressAttempt]:
        """See `NetworkedSandbox.egress_attempts`."""
        return (await self._call(ReadEgress(lease_id=self._leased.lease_id), EgressRead)).attempts

    async def save(self, checkpoint_id: str) -> SavedSandbox:
        """Save the machine while it runs; `LeaseSpec.branch_of` resumes from the checkpoint.

        Raises:
            SandboxError: The backend cannot save machines, or failed to; the machine continues.

        """
        message = SaveSandbox(lease_id=self._leased.lease_id, checkpoint_id=checkpoint_id)
        saved = await self._call(message, SandboxSaved, within_s=SAVE_S_MAX)
        return SavedSandbox(checkpoint_id=saved.checkpoint_id, host=saved.host)

    async def close(self) -> None:
        """Release the machine; a host that does not answer ends it when the lease expires."""
        with contextlib.suppress(SandboxError):
            await self._call(ReleaseSandbox(lease_id=self._leased.lease_id), Ack)

    async def renew(self, deadline_s: float) -> None:
        """Renew the lease; raise `SandboxDied` if it is gone."""
        message = AcquireSandbox(
            lease_id=self._leased.lease_id,
            holder=self._spec.holder,
            lease_s=self._spec.lease_s,
        )
        service = host_service(self._leased.host)
        await call(self._client, service, message, SandboxLeased, deadline_s)

    async def _call(self, message: Message, expected: type[M], *, within_s: float = 0.0) -> M:
        service = host_service(self._leased.host)
        deadline_s = within_s + self._spec.margin_s
        return await call(self._client, service, message, expected, deadline_s)


log = logging.getLogger(__name__)

AVOID_S = 6.0
"""Seconds to avoid a host that did not answer; the scheduler forgets dead hosts sooner."""


@contextlib.asynccontextmanager
async def lease_sandbox(
    client: SandboxClient, lease_id: str, spec: LeaseSpec
) -> AsyncGenerator[RemoteSandbox]:
    """Hold a machine while the block runs, renewing its lease, then destroy it.

    Raises:
        SandboxBusyError: No host had room within `spec.acquire_wait_s`.
        SandboxError: The host failed.

    """
    # Larger groups keep their place on the host: another of their machines may be about to lease.
    is_alone = spec.group is not None and spec.group.num_machines == 1
    try:
        sandbox = RemoteSandbox(client, await _acquire(client, lease_id, spec), spec)
    except SandboxError as error:
        log.warning("no machine for lease %s: %s", lease_id, error)
        # The other machines of the group would be refused in the same way.
        if isinstance(error, ImageAbsent | NeedsRefused) or is_alone:
            await _release_placement(client, spec)
        raise
    log.debug("lease %s is on %s", lease_id, sandbox.host)
    renewal = asyncio.create_task(keep_renewed(client, sandbox.renew, spec))
    try:
        yield sandbox
    finally:
        # Stop renewing before the release, or a late renewal would find the machine gone.
        renewal.cancel()
        await asyncio.gather(renewal, return_exceptions=True)
        await sandbox.close()
        if is_alone:
            await _release_placement(client, spec)


async def _release_placement(client: SandboxClient, spec: LeaseSpec) -> None:
    """Free the group's place now; without this the scheduler learns of it from host reports."""
    if spec.group is not None:
        message = ReleaseGroup(group_id=spec.group.group_id)
        with contextlib.suppress(SandboxError):
            await call(client, SCHEDULER_SERVICE, message, Ack, spec.margin_s)


async def _acquire(client: SandboxClient, lease_id: str, spec: LeaseSpec) -> SandboxLeased:
    group, branch_of = spec.group, spec.branch_of
    message = AcquireSandbox(
        lease_id=lease_id,
        holder=spec.holder,
        lease_s=spec.lease_s,
        is_placed=group is not None or branch_of is not None,
        checkpoint_id=branch_of.checkpoint_id if branch_of else "",
        group_id=group.group_id if group else "",
        image_digest=spec.image_digest,
        machine=spec.machine,
        is_grading=spec.is_grading,
        takes_over=spec.takes_over,
        avoid_host=spec.avoid_host,
    )

    async def place(avoid_host: str) -> str:
        if branch_of is not None:
            return branch_of.host
        return "" if group is None else await place_group(client, group, spec, avoid_host)

    what = "sandbox host with room"
    return await lease_where_placed(client, spec, place, message, SandboxLeased, what)


async def lease_where_placed(  # noqa: PLR0913, PLR0917 - a request, and where it goes
    client: SandboxClient,
    spec: LeaseSpec,
    place: Callable[[str], Awaitable[str]],
    message: Message,
    expected: type[M],
    what: str,
) -> M:
    """Choose a host, send it a lease request, and return the answer; retry until one has room.

    Args:
        client: Connection to the hosts and the scheduler.
        spec: Lease settings, among them how long and how often to try.
        place: Returns the host to use ("" for any with room), given a host to avoid.
        message: Lease request.
        expected: Type of the answer.
        what: Name of what is leased, for the error text.

    Raises:
        SandboxBusyError: No host had room within `spec.acquire_wait_s`.
        SandboxError: The host failed.

    """
    avoid, avoid_until = "", 0.0
    # A preference only: if the host to avoid is the only one with room, it may answer from then on.
    give_in_at = client.monotonic() + AVOID_S

    async def attempt() -> M:
        nonlocal avoid, avoid_until, message
        if isinstance(message, AcquireSandbox) and client.monotonic() >= give_in_at:
            message = msgspec.structs.replace(message, avoid_host="")
        # Placed again on each attempt, since room may have appeared on another host.
        host = await place(avoid if client.monotonic() < avoid_until else "")
        service = host_service(host) if host else ACQUIRE_SERVICE
        try:
            return await call(client, service, message, expected, spec.margin_s)
        except SandboxTimeout:
            # The scheduler may still list a dead host; without this it would be chosen again.
            if host:
                log.warning("%s did not answer; avoided for %g s", host, AVOID_S)
                avoid, avoid_until = host, client.monotonic() + AVOID_S
            raise

    retry = RetryPolicy(pause_s=spec.retry_delay_s, deadline_s=spec.acquire_wait_s)
    retry_on = (SandboxBusyError, SandboxTimeout)
    try:
        return await with_retries(attempt, retry, retry_on=retry_on, sleep=client.sleep)
    except retry_on as error:
        text = f"no {what} within {spec.acquire_wait_s:g} s: {error}"
        raise SandboxBusyError(text) from error


async def place_group(
    client: SandboxClient, group: GroupSpec, spec: LeaseSpec, avoid_host: str
) -> str:
    """Return the host that the scheduler chose for a group, the same for all of its machines.

    Raises:
        SandboxBusyError: No host has room, or the holder's quota is used up.
        SandboxTimeout: The scheduler does not answer.

    """
    message = PlaceGroup(
        group_id=group.group_id,
        holder=group.holder or spec.holder,
        num_machines=group.num_machines,
        image_digest=spec.image_digest,
        lease_s=spec.lease_s,
        avoid_host=avoid_host,
        is_grading=spec.is_grading,
    )
    return (await call(client, SCHEDULER_SERVICE, message, GroupPlaced, spec.margin_s)).host


async def keep_renewed(
    client: SandboxClient, renew: Callable[[float], Awaitable[object]], spec: LeaseSpec
) -> None:
    """Renew a lease until cancelled or until it is lost; users of the machine notice the loss.

    A lease is lost when its host says so, or when no renewal succeeded for its whole duration.

    Args:
        client: Source of time.
        renew: Renews once within the given seconds; raises `SandboxDied` if nothing is left.
        spec: Lease settings.

    """
    # A third of the lease, so that a failed renewal can be retried before it expires.
    period_s = pause_s = spec.lease_s / 3
    held_until = client.monotonic() + spec.lease_s
    while client.monotonic() + pause_s < held_until:
        await client.sleep(pause_s)
        try:
            await renew(min(period_s, spec.margin_s))
        except SandboxDied as error:
            log.warning("lease of %s lost: %s", spec.holder, error)
            return
        except SandboxError as error:
            log.warning("lease of %s not renewed yet: %s", spec.holder, error)
            pause_s = min(period_s, spec.retry_delay_s)
        else:
            pause_s, held_until = period_s, client.monotonic() + spec.lease_s
    log.warning("lease of %s lost: no renewal in %g s", spec.holder, spec.lease_s)


def _named(files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {packed_name(path): data for path, data in files.items()}
