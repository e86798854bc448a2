"""The sandbox scheduler: decides which host gets the machines of a group.

It keeps nothing on disk: after a restart, hosts report their groups within a second, and the
scheduler adopts them. Hosts enforce their own limits, so a wrong placement only costs a wait.
"""

import logging
from collections.abc import AsyncIterator, Mapping

from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.actors.scheduler.host_registry import HostRegistry, HostsFullError
from penstock.envs.sandbox_client.client import SCHEDULER_SERVICE, SandboxBusyError, to_remote_error
from penstock.messages.base import Message
from penstock.messages.bus import Serve
from penstock.messages.requests.scheduler import GroupPlaced, PlaceGroup, ReleaseGroup, ReportHost
from penstock.messages.rpc import Ack, RemoteError, RemoteErrorKind

log = logging.getLogger(__name__)

LEARN_S = 2.5
"""Seconds after a start in which no new group is placed: it may have a host that did not report
yet, and would get a second one."""


class SandboxScheduler(Actor):
    """Places groups on sandbox hosts; a run has at most one.

    Args:
        quota: Maximum machines placed for one holder; 0 for no limit.
        quotas: Quotas of single holders that replace `quota`.

    """

    role = "scheduler"
    tick_s = 1.0

    def __init__(
        self,
        quota: int = 0,
        quotas: Mapping[str, int] | None = None,
        registry_type: type[HostRegistry] = HostRegistry,
    ) -> None:
        self._quota = quota
        self._quotas = quotas
        self._registry_type = registry_type
        self._tally = {"placed": 0, "refused": 0, "expired": 0, "image_hits": 0}

    def services(self) -> Mapping[str, Serve]:
        """Return the service for clients and hosts."""
        return {SCHEDULER_SERVICE: self._answer}

    async def start(self, ctx: Context) -> Effects:
        """Start without any host."""
        self._ctx = ctx
        self._hosts = self._registry_type(ctx.random, quota=self._quota, quotas=self._quotas)
        self._learns_until = ctx.monotonic() + LEARN_S
        log.info("waiting %g s for reports of hosts", LEARN_S)
        return ()

    async def on_tick(self, ctx: Context) -> Effects:
        """Forget silent hosts and expired groups; set gauges."""
        num_expired = self._hosts.expire(ctx.monotonic())
        self._tally["expired"] += num_expired
        if num_expired:
            log.warning("%d silent hosts and unrenewed groups forgotten", num_expired)
        for name, value in self._tally.items():
            ctx.set_gauge(name, value)
        ctx.set_gauge("hosts", self._hosts.num_hosts)
        ctx.set_gauge("machines", self._hosts.num_placed)
        return ()

    async def _answer(self, message: Message) -> AsyncIterator[Message]:
        match message:
            case PlaceGroup():
                yield self._place(message)
            case ReleaseGroup():
                self._hosts.release(message.group_id)
                yield Ack()
            case ReportHost():
                self._hosts.report(
                    message.host,
                    num_slots=message.num_slots,
                    num_live=message.num_live,
                    reserved_slots=message.reserved_slots,
                    images=message.image_digests,
                    groups=message.groups,
                    now=self._ctx.monotonic(),
                )
                yield Ack()
            case _:
                yield _refused(f"{type(message).__name__} is not a scheduler request")

    def _place(self, request: PlaceGroup) -> Message:
        now = self._ctx.monotonic()
        if now < self._learns_until and not self._hosts.knows(request.group_id):
            return self._busy("the scheduler has just started and waits for reports of hosts")
        try:
            placement = self._hosts.place(
                request.group_id,
                num_machines=request.num_machines,
                image=request.image_digest,
                holder=request.holder,
                lease_s=request.lease_s,
                now=now,
                avoid=request.avoid_host,
                is_grading=request.is_grading,
            )
        except HostsFullError as error:
            log.info("group %s: refused for now: %s", request.group_id, error)
            return self._busy(str(error))
        except ValueError as error:
            log.warning("group %s: refused: %s", request.group_id, error)
            return _refused(str(error))
        log.debug("group %s: placed on %s", request.group_id, placement.host)
        self._tally["placed"] += 1
        self._tally["image_hits"] += placement.has_image
        return GroupPlaced(
            group_id=request.group_id, host=placement.host, has_image=placement.has_image
        )

    def _busy(self, text: str) -> RemoteError:
        self._tally["refused"] += 1
        return to_remote_error(SandboxBusyError(text))


def _refused(text: str) -> RemoteError:
    return RemoteError(kind=RemoteErrorKind.INVALID, error=text)
