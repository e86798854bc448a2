"""The process group of the ranks, from the environment variables that torchrun sets."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.actors.policy.device import open_device
from penstock.messages.errors import ConfigError

T = TypeVar("T")

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
_PORT_MAX = 65_535
_ALONE_S = 60.0
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """Which rank a process is."""

    rank: int
    """0 .. `num_ranks` - 1."""
    num_ranks: int
    local_rank: int
    """On its host; also the index of its GPU."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "RankEnvironment":
        """Read the variables that torchrun, JobSet and others set.

        Args:
            environment: with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

        Raises:
            ConfigError: One is missing or no number, the rank is not below the number of ranks, or
                the port is none.

        """
        for name in (*_NUMBERS, "MASTER_ADDR"):
            value = environment.get(name)
            if not value:
                text = "expected what torchrun sets, it is not set"
                raise ConfigError(f"environment variable {name}: {text}")
            if name in _NUMBERS and not value.isdecimal():
                raise ConfigError(f"environment variable {name}: expected a number, got {value!r}")
        rank, num_ranks, local_rank = (int(environment[name]) for name in _NUMBERS[:3])
        if rank >= num_ranks:
            expected = f"expected a number below WORLD_SIZE {num_ranks}"
            raise ConfigError(f"environment variable RANK: {expected}, got {rank}")
        if int(environment["MASTER_PORT"]) > _PORT_MAX:
            text = f"expected at most {_PORT_MAX}, got {environment['MASTER_PORT']}"
            raise ConfigError(f"environment variable MASTER_PORT: {text}")
        return cls(rank=rank, num_ranks=num_ranks, local_rank=local_rank)


class World:
    """The process group, as one rank sees it.

    Its methods are collective: all ranks call the same ones in the same order.
    """

    def __init__(
        self,
        environment: RankEnvironment,
        device: str,
        timeout_s: float,
        store: dist.Store | None = None,
    ) -> None:
        """Join the process group.

        Args:
            environment: of this process; MASTER_ADDR and MASTER_PORT are read from `os.environ`.
            device: cpu or cuda.
            timeout_s: of joining, and of every collective operation.
            store: in which ranks find each other, instead of at MASTER_ADDR.

        Raises:
            DeviceUnavailableError: The device is not there.
            torch.distributed.DistError: The other ranks did not join in time.

        """
        self.rank, self.num_ranks = environment.rank, environment.num_ranks
        self.device = open_device(device, "trainer.device", environment.local_rank)
        timeout = timedelta(seconds=timeout_s)
        places = {"rank": self.rank, "world_size": self.num_ranks, "timeout": timeout}
        if not dist.is_initialized():  # One that is alone may open several learners.
            dist.init_process_group(_BACKENDS[device], store=store, **places)
        self.mesh: DeviceMesh = init_device_mesh(device, (self.num_ranks,))

    @classmethod
    def alone(cls, device: str) -> "World":
        """Return the world of a process that trains by itself."""
        only = RankEnvironment(rank=0, num_ranks=1, local_rank=0)
        return cls(only, device, _ALONE_S, dist.HashStore())

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank; they must be picklable."""
        found: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(found, value)
        return found

    def close(self) -> None:
        """Leave the group; end the process with `os._exit` then, since gloo may abort at exit."""
        dist.destroy_process_group()
