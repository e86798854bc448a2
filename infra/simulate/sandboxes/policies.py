"""How the scheduler chooses hosts, and what that is compared with."""

from penstock.actors.scheduler.host_registry import HostRegistry, HostsFullError
from penstock.actors.scheduler.placement import Host


class RoundRobinRegistry(HostRegistry):
    """Takes one host after the other, whatever image it holds."""

    _next = 0

    def choose_host(
        self, image: str, num_machines: int, avoid: str, is_grading: bool
    ) -> tuple[Host, bool]:
        """See `HostRegistry.choose_host`."""
        for _ in self.names:
            self._next = (self._next + 1) % len(self.names)
            host = self.hosts[self.names[self._next]]
            if host.has_room(num_machines, is_grading=is_grading) and host.name != avoid:
                return host, image in host.images
        raise HostsFullError(f"no room for {num_machines} machines on {self.num_hosts} hosts")


POLICIES: dict[str, type[HostRegistry]] = {
    "affinity": HostRegistry,
    "round_robin": RoundRobinRegistry,
}
"""Command-line name -> what chooses hosts."""
