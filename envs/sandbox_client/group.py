"""Machines of one group on one host: placed, leased, renewed and released by one message each.

```
 lease_group ──PlaceGroup──▶ the scheduler: which host
     ├──AcquireGroup──▶ that host: all machines or none; no answer: placed again, elsewhere
     ├──RenewGroups───▶ as long as the block runs
     └──ReleaseGroup──▶ host and scheduler
```
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

import msgspec

from penstock.envs.sandbox import SandboxDied, SandboxError
from penstock.envs.sandbox_client.client import (
    SCHEDULER_SERVICE,
    GroupSpec,
    LeaseSpec,
    SandboxClient,
    call,
    host_service,
)
from penstock.envs.sandbox_client.lease import keep_renewed, lease_where_placed, place_group
from penstock.envs.sandbox_client.remote_sandbox import RemoteSandbox
from penstock.messages.requests.scheduler import ReleaseGroup
from penstock.messages.rpc import Ack
from penstock.messages.sandbox import (
    AcquireGroup,
    GroupLeased,
    GroupsRenewed,
    RenewGroups,
    SandboxLeased,
)


async def acquire_group(
    client: SandboxClient, group: GroupSpec, lease_ids: Sequence[str], spec: LeaseSpec
) -> GroupLeased:
    """Lease all machines of a group; nothing renews them.

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
    """Renew all that is held on a host; return the groups that are gone.

    Raises:
        SandboxTimeout: The host does not answer.

    """
    message = RenewGroups(group_ids=list(group_ids))
    renewed = await call(client, host_service(host), message, GroupsRenewed, spec.margin_s)
    return renewed.gone


async def release_group(client: SandboxClient, host: str, group_id: str, spec: LeaseSpec) -> None:
    """Release all machines of a group; a host that cannot be reached reaps them."""
    message = ReleaseGroup(group_id=group_id)
    for service in (host_service(host), SCHEDULER_SERVICE):
        with contextlib.suppress(SandboxError):
            await call(client, service, message, Ack, spec.margin_s)


@contextlib.asynccontextmanager
async def lease_group(
    client: SandboxClient, group: GroupSpec, lease_ids: Sequence[str], spec: LeaseSpec
) -> AsyncGenerator[list[RemoteSandbox]]:
    """Hold a group's machines for the time of the block; they are destroyed after it.

    Raises:
        SandboxBusyError: No host had room for all of them in time.
        SandboxError: The host failed.

    """
    leased = await acquire_group(client, group, lease_ids, spec)
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
        renewal.cancel()
        await asyncio.gather(renewal, return_exceptions=True)
        await release_group(client, leased.host, group.group_id, spec)
