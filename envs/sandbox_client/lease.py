"""One machine of a host: placed, leased, renewed meanwhile, released."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec

from penstock.envs.sandbox import (
    ImageAbsent,
    NeedsRefused,
    SandboxDied,
    SandboxError,
    SandboxTimeout,
)
from penstock.envs.sandbox_client.client import (
    ACQUIRE_SERVICE,
    SCHEDULER_SERVICE,
    GroupSpec,
    LeaseSpec,
    M,
    SandboxBusyError,
    SandboxClient,
    call,
    host_service,
)
from penstock.envs.sandbox_client.remote_sandbox import RemoteSandbox
from penstock.messages.base import Message
from penstock.messages.requests.scheduler import GroupPlaced, PlaceGroup, ReleaseGroup
from penstock.messages.retries import RetryPolicy, with_retries
from penstock.messages.rpc import Ack
from penstock.messages.sandbox import AcquireSandbox, SandboxLeased

AVOID_S = 6.0
"""How long a host that did not answer is avoided; the scheduler forgets dead ones sooner."""


@contextlib.asynccontextmanager
async def lease_sandbox(
    client: SandboxClient, lease_id: str, spec: LeaseSpec
) -> AsyncGenerator[RemoteSandbox]:
    """Hold a machine for the time of the block; it is renewed meanwhile and destroyed after.

    Raises:
        SandboxBusyError: No host had room for `spec.acquire_wait_s`.
        SandboxError: The host failed.

    """
    is_alone = spec.group is not None and spec.group.num_machines == 1
    try:
        sandbox = RemoteSandbox(client, await _acquire(client, lease_id, spec), spec)
    except SandboxError as error:
        if isinstance(error, ImageAbsent | NeedsRefused) or is_alone:
            await _release_room(client, spec)
        raise
    renewal = asyncio.create_task(keep_renewed(client, sandbox.renew, spec))
    try:
        yield sandbox
    finally:
        renewal.cancel()
        await asyncio.gather(renewal, return_exceptions=True)
        await sandbox.close()
        if is_alone:
            await _release_room(client, spec)


async def _release_room(client: SandboxClient, spec: LeaseSpec) -> None:
    """Report to the scheduler now what it would learn from hosts' reports, or by waiting."""
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

    return await lease_where_placed(client, spec, place, message, SandboxLeased, "sandbox_host")


async def lease_where_placed(  # noqa: PLR0913, PLR0917 - a request, and where it goes
    client: SandboxClient,
    spec: LeaseSpec,
    place: Callable[[str], Awaitable[str]],
    message: Message,
    expected: type[M],
    what: str,
) -> M:
    """Send a request to the host that a placement names, with retries; return the answer.

    Args:
        client: Sends.
        spec: How long and how often to try.
        place: Takes a host to avoid, returns the one to use; "" for any with room.
        message: The request.
        expected: The answer's type.
        what: Is leased, for the error.

    Raises:
        SandboxBusyError: No host had room for `spec.acquire_wait_s`.
        SandboxError: The host failed.

    """
    avoid, avoid_until = "", 0.0

    give_in_at = client.monotonic() + AVOID_S

    async def attempt() -> M:
        nonlocal avoid, avoid_until, message
        if isinstance(message, AcquireSandbox) and client.monotonic() >= give_in_at:
            message = msgspec.structs.replace(message, avoid_host="")
        host = await place(avoid if client.monotonic() < avoid_until else "")
        service = host_service(host) if host else ACQUIRE_SERVICE
        try:
            return await call(client, service, message, expected, spec.margin_s)
        except SandboxTimeout:
            if host:
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
    """Return the host that has room for a group: the same one for all of its machines.

    Raises:
        SandboxBusyError: None has, or the quota is used up.
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
    """Renew until cancelled, or until all is gone, which the machines' users then notice.

    Gone is what its host reports as gone, and what no host has answered for during a whole lease.

    Args:
        client: Sleeps.
        renew: Tries once, with this deadline; raises `SandboxDied` if nothing is left.
        spec: How long a lease is.

    """
    period_s = pause_s = spec.lease_s / 3
    held_until = client.monotonic() + spec.lease_s
    while client.monotonic() + pause_s < held_until:
        await client.sleep(pause_s)
        try:
            await renew(min(period_s, spec.margin_s))
        except SandboxDied:
            return
        except SandboxError:
            pause_s = min(period_s, spec.retry_delay_s)
        else:
            pause_s, held_until = period_s, client.monotonic() + spec.lease_s
