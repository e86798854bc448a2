"""What the scheduler's choice is compared with."""

from collections.abc import Sequence

from penstock.actors.runtime.actor import Effects
from penstock.actors.runtime.context import Context
from penstock.actors.scheduler.actor import SandboxScheduler
from penstock.actors.scheduler.host_registry import HostRegistry, HostsFullError
from penstock.actors.scheduler.placement import Host


class RoundRobin(HostRegistry):
    """Takes one host after the other, whatever image it holds."""

    _next = 0

    def _choose(
        self, image: str, num_machines: int, avoid: str, is_grading: bool
    ) -> tuple[Host, bool]:
        names: Sequence[str] = self._names
        for _ in names:
            self._next = (self._next + 1) % len(names)
            host = self._hosts[names[self._next]]
            if host.has_room(num_machines, is_grading=is_grading) and host.name != avoid:
                return host, image in host.images
        raise HostsFullError(f"no room for {num_machines} machines on {self.num_hosts} hosts")


class RoundRobinScheduler(SandboxScheduler):
    """The real scheduler with that choice."""

    async def start(self, ctx: Context) -> Effects:
        """Begin without any host."""
        await super().start(ctx)
        self._hosts = RoundRobin(ctx.random, quota=self._quota, quotas=self._quotas)
        return ()


SCHEDULERS: dict[str, type[SandboxScheduler]] = {
    "affinity": SandboxScheduler,
    "round_robin": RoundRobinScheduler,
}
