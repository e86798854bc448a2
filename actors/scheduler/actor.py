"""The sandbox scheduler: hosts report to it, and it decides where a group's machines go.

It keeps nothing on disk: after a restart the hosts report within a second, with the groups that
they hold, and those are adopted. Hosts bound themselves, so a wrong guess costs only a wait.
"""

from collections.abc import AsyncIterator, Mapping

from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.actors.scheduler.host_registry import HostRegistry, HostsFullError
from penstock.envs.sandbox_client.client import SCHEDULER_SERVICE, SandboxBusyError, to_remote_error
from penstock.messages.base import Message
from penstock.messages.bus import Serve
from penstock.messages.requests.scheduler import GroupPlaced, PlaceGroup, ReleaseGroup, ReportHost
from penstock.messages.rpc import Ack, RemoteError, RemoteErrorKind

LEARN_S = 2.5
"""After a start, how long only groups that hosts report are placed: others might get two hosts."""


class SandboxScheduler(Actor):
    """Places groups on sandbox hosts; a run has at most one.

    Args:
        quota: Most machines that one holder may have placed; 0 for no bound.
        quotas: Those of holders that have one of their own.
        registry_type: Chooses hosts; a simulation compares others.

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
        """Return the one service."""
        return {SCHEDULER_SERVICE: self._answer}

    async def start(self, ctx: Context) -> Effects:
        """Begin without any host."""
        self._ctx = ctx
        self._hosts = self._registry_type(ctx.random, quota=self._quota, quotas=self._quotas)
        self._learns_until = ctx.monotonic() + LEARN_S
        return ()

    async def on_tick(self, ctx: Context) -> Effects:
        """Forget silent hosts and expired groups; set gauges."""
        self._tally["expired"] += self._hosts.expire(ctx.monotonic())
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
                yield _refused(f"{type(message).__name__} is no request to a scheduler")

    def _place(self, request: PlaceGroup) -> Message:
        now = self._ctx.monotonic()
        if now < self._learns_until and not self._hosts.knows(request.group_id):
            return self._busy("the scheduler has just started and waits for hosts' reports")
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
            return self._busy(str(error))
        except ValueError as error:
            return _refused(str(error))
        self._tally["placed"] += 1
        self._tally["image_hits"] += placement.has_image
        return GroupPlaced(
            group_id=request.group_id, host=placement.host, has_image=placement.has_image
        )

    def _busy(self, words: str) -> RemoteError:
        self._tally["refused"] += 1
        return to_remote_error(SandboxBusyError(words))


def _refused(words: str) -> RemoteError:
    return RemoteError(kind=RemoteErrorKind.INVALID, error=words)
