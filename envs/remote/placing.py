"""Finding the host: the scheduler's choice for a group, else any with room."""

from collections.abc import Awaitable, Callable

from penstock.envs.remote.client import (
    ACQUIRE_SERVICE,
    FLEET_SERVICE,
    Asker,
    M,
    SandboxBusyError,
    ask,
    host_service,
)
from penstock.envs.remote.lease_spec import GroupTerms, LeaseTerms
from penstock.envs.sandbox import SandboxTimeout
from penstock.messages.base import Message
from penstock.messages.scheduler import GroupPlaced, PlaceGroup

AVOID_S = 6.0
"""A host that did not answer is avoided so long; the scheduler forgets dead ones sooner."""


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


async def place_sandbox(asker: Asker, terms: LeaseTerms, avoid_host: str) -> str:
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
