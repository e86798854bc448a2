"""What `python -m tests.lab simulate-sandboxes` assumes, and the policies that it compares."""

import itertools
import random

import msgspec

from penstock.actors.scheduler.host_registry import Host, HostRegistry, HostsFullError
from penstock.messages.errors import ConfigError

FLAGS = {"num_machines": "--machines", "num_hosts": "--hosts", "num_failures": "--failures"}


class BurstScenario(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated, and with which assumptions."""

    seed: int = 0
    num_machines: int = 100_000
    group_size: int = 16
    num_hosts: int = 400
    num_cores: int = 64
    """Cores of a host; as many machines boot there at once."""
    num_slots: int = 320
    """Machines that a host has memory for."""
    num_images: int = 2000
    zipf_exponent: float = 1.1
    image_touched_mib: int = 48
    """What a boot and a first test page in of an image, lazily."""
    link_gbit_s: float = 25.0
    """Link of a host, which pages of images cross."""
    boot_ms: float = 25.0
    boot_sigma: float = 0.25
    """Boot times are log-normal around their median."""
    network_ms_max: float = 0.5
    """Maximum latency of one step between actors, where the bus is simulated."""
    num_failures: int = 4
    """Hosts that die in the middle of the burst over a real server, one after the other."""
    num_at_once: int = 256
    """Groups that are requested at once."""
    is_by_machine: bool = False
    """Each machine is a group of its own; its image is still the one of its group."""

    def __post_init__(self) -> None:
        """Refuse what cannot be simulated."""
        for name in ("num_machines", "group_size", "num_hosts", "num_images", "num_at_once"):
            if getattr(self, name) < 1:
                raise self._error(name, "1 or more")
        if self.num_machines % self.group_size:
            raise self._error("num_machines", f"groups of {self.group_size} machines")
        if not 0 <= self.num_failures < self.num_hosts:
            raise self._error("num_failures", f"0 to {self.num_hosts - 1}, fewer than hosts")
        groups_a_host = self.num_slots // self.group_size
        room = (self.num_hosts - self.num_failures) * groups_a_host * self.group_size
        if self.num_machines > room:
            raise self._error("num_machines", f"{room} or fewer, on the hosts that live on")

    def _error(self, name: str, expected: str) -> ConfigError:
        field = FLAGS.get(name, f"simulation: {name}")
        return ConfigError(f"{field}: expected {expected}, got {getattr(self, name)}")

    @property
    def num_groups(self) -> int:
        """Groups of the burst."""
        return self.num_machines // self.placed_size

    @property
    def placed_size(self) -> int:
        """Machines that are placed together."""
        return 1 if self.is_by_machine else self.group_size

    @property
    def fetch_s(self) -> float:
        """What a host's link takes for one image."""
        return self.image_touched_mib * 8.389e6 / (self.link_gbit_s * 1e9)

    def terabytes(self, num_fetched: int) -> float:
        """Return what that many images weigh."""
        return round(num_fetched * self.image_touched_mib * 1.048576e-6, 4)

    def draw_images(self) -> list[str]:
        """Return each group's image, the first ones being popular."""
        ranks = range(1, self.num_images + 1)
        weights = list(itertools.accumulate(rank**-self.zipf_exponent for rank in ranks))
        num_drawn = self.num_machines // self.group_size
        drawn = random.Random(self.seed).choices(ranks, cum_weights=weights, k=num_drawn)
        num_alike = self.group_size // self.placed_size
        return [f"image-{rank}" for rank in drawn for _ in range(num_alike)]


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
