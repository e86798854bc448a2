"""Leases all machines of a group on one host, with one message per step for the whole group.

```
 lease_group ──PlaceGroup──▶ scheduler: chooses the host
     ├──AcquireGroup──▶ that host: all machines or none; if it does not answer, another host
     ├──RenewGroups───▶ that host, while the block runs
     └──ReleaseGroup──▶ host and scheduler
```
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence

import msgspec

from penstock.envs.sandbox import SandboxDied, SandboxError
from penstock.envs.sandbox_client.client import (
    SCHEDULER_SERVICE,
    GroupSpec,
    LeaseSpec,
    RemoteSandbox,
    SandboxClient,
    call,
    host_service,
    keep_renewed,
    lease_where_placed,
    place_group,
)
from penstock.messages.requests.scheduler import ReleaseGroup
from penstock.messages.rpc import Ack
from penstock.messages.sandbox import (
    AcquireGroup,
    GroupLeased,
    GroupsRenewed,
    RenewGroups,
    SandboxLeased,
)

log = logging.getLogger(__name__)


async def acquire_group(
    client: SandboxClient, group: GroupSpec, lease_ids: Sequence[str], spec: LeaseSpec
) -> GroupLeased:
    """Lease all machines of a group; the caller has to renew them.

    Raises:
        SandboxBusyError: No host had room for `spec.acquire_wait_s`.
        SandboxError: The host failed.

    """
    message = AcquireGroup(
        group_id=group.group_id,
        holder=group.holder or spec.holder,
        lease_ids=list(lease_ids),
        lease_s=spec.lease_s,
        image_digest=spec.image_digest,
        machine=spec.machine,
    )

    async def place(avoid_host: str) -> str:
        return await place_group(client, group, spec, avoid_host)

    what = f"room for {group.group_id}"
    return await lease_where_placed(client, spec, place, message, GroupLeased, what)


async def renew_groups(
    client: SandboxClient, host: str, group_ids: Sequence[str], spec: LeaseSpec
) -> list[str]:
    """Renew groups on a host and return the ids of those that it no longer has.

    Raises:
        SandboxTimeout: The host does not answer.

    """
    message = RenewGroups(group_ids=list(group_ids))
    renewed = await call(client, host_service(host), message, GroupsRenewed, spec.margin_s)
    return renewed.gone


async def release_group(client: SandboxClient, host: str, group_id: str, spec: LeaseSpec) -> None:
    """Release all machines of a group; a host that does not answer ends them at lease expiry."""
    message = ReleaseGroup(group_id=group_id)
    # The host first: the scheduler would otherwise place others there before there is room.
    for service in (host_service(host), SCHEDULER_SERVICE):
        try:
            await call(client, service, message, Ack, spec.margin_s)
        except SandboxError as error:
            log.warning("group %s not released at %s: %s", group_id, service, error)


@contextlib.asynccontextmanager
async def lease_group(
    client: SandboxClient, group: GroupSpec, lease_ids: Sequence[str], spec: LeaseSpec
) -> AsyncGenerator[list[RemoteSandbox]]:
    """Hold the machines of a group while the block runs, then destroy them.

    Raises:
        SandboxBusyError: No host had room for all of them in time.
        SandboxError: The host failed.

    """
    leased = await acquire_group(client, group, lease_ids, spec)
    log.debug("group %s has %d machines on %s", group.group_id, len(lease_ids), leased.host)
    machines = [
        SandboxLeased(lease_id=lease_id, host=leased.host, sandbox=record)
        for lease_id, record in zip(lease_ids, leased.sandboxes, strict=True)
    ]

    async def renew(deadline_s: float) -> None:
        held = msgspec.structs.replace(spec, margin_s=deadline_s)
        if await renew_groups(client, leased.host, [group.group_id], held):
            raise SandboxDied(f"{leased.host} holds no machine of {group.group_id}")

    renewal = asyncio.create_task(keep_renewed(client, renew, spec))
    try:
        yield [RemoteSandbox(client, machine, spec) for machine in machines]
    finally:
        # Stop renewing before the release, or a late renewal would find the group gone.
        renewal.cancel()
        await asyncio.gather(renewal, return_exceptions=True)
        await release_group(client, leased.host, group.group_id, spec)
