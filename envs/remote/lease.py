"""Holding one machine of a host: asked for, renewed meanwhile, given back."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

from penstock.envs.remote.client import SCHEDULER_SERVICE, SandboxClient, ask
from penstock.envs.remote.lease_spec import LeaseSpec
from penstock.envs.remote.placing import lease_where_placed, place_sandbox
from penstock.envs.remote.sandbox import RemoteSandbox
from penstock.envs.sandbox import ImageAbsent, SandboxDied, SandboxError
from penstock.messages.rpc import Ack
from penstock.messages.sandbox import AcquireSandbox, SandboxLeased
from penstock.messages.scheduler import ReleaseGroup


@contextlib.asynccontextmanager
async def lease_sandbox(
    client: SandboxClient, lease_id: str, spec: LeaseSpec
) -> AsyncGenerator[RemoteSandbox]:
    """Hold a machine for the time of the block; it is renewed meanwhile and destroyed after.

    Raises:
        SandboxBusyError: No host had room for `spec.acquire_wait_s`.
        SandboxError: The host failed.

    """
    try:
        sandbox = RemoteSandbox(client, await _acquire(client, lease_id, spec), spec)
    except SandboxError as error:
        if isinstance(error, ImageAbsent) or _is_alone(spec):
            await _give_room_back(client, spec)
        raise
    renewal = asyncio.create_task(keep_renewed(client, sandbox.renew, spec))
    try:
        yield sandbox
    finally:
        renewal.cancel()
        await asyncio.gather(renewal, return_exceptions=True)
        await sandbox.close()
        if _is_alone(spec):
            await _give_room_back(client, spec)


def _is_alone(spec: LeaseSpec) -> bool:
    """Return whether a group's room is this machine's alone."""
    return spec.group is not None and spec.group.num_machines == 1


async def _give_room_back(client: SandboxClient, spec: LeaseSpec) -> None:
    """Tell the scheduler what it would learn from hosts' reports, or by waiting."""
    if spec.group is not None:
        message = ReleaseGroup(group_id=spec.group.group_id)
        with contextlib.suppress(SandboxError):
            await ask(client, SCHEDULER_SERVICE, message, Ack, spec.margin_s)


async def _acquire(client: SandboxClient, lease_id: str, spec: LeaseSpec) -> SandboxLeased:
    message = AcquireSandbox(
        lease_id=lease_id,
        holder=spec.holder,
        lease_s=spec.lease_s,
        is_placed=spec.group is not None or spec.branch_of is not None,
        checkpoint_id=spec.branch_of.checkpoint_id if spec.branch_of else "",
        group_id=spec.group.group_id if spec.group else "",
        image_digest=spec.image_digest,
        is_grading=spec.is_grading,
        takes_over=spec.takes_over,
    )

    async def place(avoid_host: str) -> str:
        return await place_sandbox(client, spec, avoid_host)

    return await lease_where_placed(client, spec, place, message, SandboxLeased, "sandbox")


async def keep_renewed(
    client: SandboxClient, renew: Callable[[float], Awaitable[object]], spec: LeaseSpec
) -> None:
    """Renew until cancelled, or until all is gone: its users meet that by themselves.

    Gone is what its host says is gone, and what no host has answered for during a whole lease.

    Args:
        client: Who holds the lease.
        renew: Asks once, with this deadline; raises `SandboxDied` where nothing is left.
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
