"""Holding one machine of a host: asked for, renewed meanwhile, given back."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

from penstock.envs.remote.client import FLEET_SERVICE, Asker, ask
from penstock.envs.remote.lease_spec import LeaseTerms
from penstock.envs.remote.placing import lease_where_placed, place_sandbox
from penstock.envs.remote.sandbox import RemoteSandbox
from penstock.envs.sandbox import ImageAbsent, SandboxDied, SandboxError
from penstock.messages.rpc import Ack
from penstock.messages.sandbox import AcquireSandbox, SandboxLeased
from penstock.messages.scheduler import ReleaseGroup


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
    except SandboxError as error:
        if isinstance(error, ImageAbsent) or _is_alone(terms):
            await _give_room_back(asker, terms)
        raise
    renewal = asyncio.create_task(keep_renewed(asker, sandbox.renew, terms))
    try:
        yield sandbox
    finally:
        renewal.cancel()
        await asyncio.gather(renewal, return_exceptions=True)
        await sandbox.close()
        if _is_alone(terms):
            await _give_room_back(asker, terms)


def _is_alone(terms: LeaseTerms) -> bool:
    """Tell whether a group's room is this machine's alone."""
    return terms.group is not None and terms.group.num_machines == 1


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
        return await place_sandbox(asker, terms, avoid_host)

    return await lease_where_placed(asker, terms, place, message, SandboxLeased, "sandbox")


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
