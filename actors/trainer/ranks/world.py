"""The processes that train together, as torchrun and its kin start them."""

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
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """Which of the processes this one is."""

    rank: int
    """0 .. `num_ranks` - 1."""
    num_ranks: int
    local_rank: int
    """On its host: the number of its GPU."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "RankEnvironment":
        """Read what torchrun, JobSet and others set.

        Args:
            environment: with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

        Raises:
            ConfigError: One is missing or no number, or the rank is not below the number of ranks.

        """
        for name in (*_NUMBERS, "MASTER_ADDR"):
            value = environment.get(name)
            if value is None:
                text = "expected what torchrun sets, it is not set"
                raise ConfigError(f"environment variable {name}: {text}")
            if name in _NUMBERS and not value.isdecimal():
                raise ConfigError(f"environment variable {name}: expected a number, got {value!r}")
        rank, num_ranks, local_rank = (int(environment[name]) for name in _NUMBERS[:3])
        if rank >= num_ranks:
            expected = f"expected a number below WORLD_SIZE {num_ranks}"
            raise ConfigError(f"environment variable RANK: {expected}, got {rank}")
        return cls(rank=rank, num_ranks=num_ranks, local_rank=local_rank)


class World:
    """A process among all ranks; what one calls here all must call, in the same order."""

    def __init__(self, environment: RankEnvironment, device: str, timeout_s: float) -> None:
        """Meet the other ranks.

        Args:
            environment: of this process, whose environment says where rank 0 is.
            device: cpu or cuda.
            timeout_s: for which ranks wait for each other, here and in every operation.

        Raises:
            DeviceUnavailableError: The device is not there.
            torch.distributed.DistError: The others did not come in time.

        """
        self.rank, self.num_ranks = environment.rank, environment.num_ranks
        self.device = open_device(device, "trainer.device", environment.local_rank)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            _BACKENDS[device], rank=self.rank, world_size=self.num_ranks, timeout=timeout
        )
        self.mesh: DeviceMesh = init_device_mesh(device, (self.num_ranks,))

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order; anything that pickle takes."""
        found: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(found, value)
        return found

    def close(self) -> None:
        """Leave; a process that has left ends with `os._exit`, since gloo may abort later."""
        dist.destroy_process_group()
