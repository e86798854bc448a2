"""Finding the host: the scheduler's choice for a group, else any with room."""

from collections.abc import Awaitable, Callable

from penstock.envs.remote.client import (
    ACQUIRE_SERVICE,
    SCHEDULER_SERVICE,
    M,
    SandboxBusyError,
    SandboxClient,
    ask,
    host_service,
)
from penstock.envs.remote.lease_spec import GroupSpec, LeaseSpec
from penstock.envs.sandbox import SandboxTimeout
from penstock.messages.base import Message
from penstock.messages.rpc import RetryPolicy, with_retries
from penstock.messages.scheduler import GroupPlaced, PlaceGroup

AVOID_S = 6.0
"""A host that did not answer is avoided so long; the scheduler forgets dead ones sooner."""


async def lease_where_placed(  # noqa: PLR0913, PLR0917 - a request, and where it goes
    client: SandboxClient,
    spec: LeaseSpec,
    place: Callable[[str], Awaitable[str]],
    wanted: Message,
    expected: type[M],
    what: str,
) -> M:
    """Ask the host that a placement names, as often as it takes, and return its answer.

    Args:
        client: Who asks.
        spec: How long, how often.
        place: Takes a host to avoid, returns the one to ask; "" for any with room.
        wanted: The request.
        expected: Its answer's type.
        what: For the error.

    Raises:
        SandboxBusyError: No host gave one for `spec.acquire_wait_s`.
        SandboxError: The host failed.

    """
    avoid, avoid_until = "", 0.0

    async def attempt() -> M:
        nonlocal avoid, avoid_until
        host = await place(avoid if client.monotonic() < avoid_until else "")
        service = host_service(host) if host else ACQUIRE_SERVICE
        try:
            return await ask(client, service, wanted, expected, spec.margin_s)
        except SandboxTimeout:
            if host:
                avoid, avoid_until = host, client.monotonic() + AVOID_S
            raise

    retry = RetryPolicy(pause_s=spec.retry_delay_s, deadline_s=spec.acquire_wait_s)
    try:
        return await with_retries(
            attempt, retry, retry_on=(SandboxBusyError, SandboxTimeout), sleep=client.sleep
        )
    except (SandboxBusyError, SandboxTimeout) as error:
        text = f"no {what} within {spec.acquire_wait_s:g} s: {error}"
        raise SandboxBusyError(text) from error


async def place_sandbox(client: SandboxClient, spec: LeaseSpec, avoid_host: str) -> str:
    """Return the host to acquire from; empty: whichever has room answers."""
    if spec.branch_of is not None:
        return spec.branch_of.host
    if spec.group is None:
        return ""
    return await place_group(client, spec.group, spec, avoid_host=avoid_host)


async def place_group(
    client: SandboxClient, group: GroupSpec, spec: LeaseSpec, *, avoid_host: str = ""
) -> str:
    """Return the host that has room for a group: the same one to all of its machines.

    Raises:
        SandboxBusyError: None has, or the quota is used up.
        SandboxTimeout: The scheduler does not answer.

    """
    wanted = PlaceGroup(
        group_id=group.group_id,
        holder=group.holder or spec.holder,
        num_machines=group.num_machines,
        image_digest=spec.image_digest,
        lease_s=spec.lease_s,
        avoid_host=avoid_host,
        is_grading=spec.is_grading,
    )
    return (await ask(client, SCHEDULER_SERVICE, wanted, GroupPlaced, spec.margin_s)).host
