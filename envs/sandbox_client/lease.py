"""Places and leases one machine of a host, renews the lease while it is in use, and releases it."""

import asyncio
import contextlib
import logging
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
