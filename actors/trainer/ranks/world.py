"""The process group of the ranks, from the environment variables that torchrun sets.

Ranks share a secret: without it nobody finds what they tell each other where they meet, and nothing
of another's is unpickled. What they send is not encrypted; `check_encrypted` has its network named.
"""

import hashlib
import hmac
import os
import pickle
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.actors.policy.device import open_device
from penstock.messages.errors import ConfigError, CorruptDataError
from penstock.messages.settings import check_encrypted

T = TypeVar("T")

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
_PORT_MAX = 65_535
_ALONE_S = 60.0
SECRET = "PENSTOCK_RANKS_SECRET"  # noqa: S105 - the name of a variable.
"""Environment variable with what all ranks of a run, and nobody else, know."""
_SECRET_CHARACTERS_MIN = 32
_DIGEST_BYTES = 32
_VALUE_BYTES_MAX = 1 << 30
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """Which rank a process is."""

    rank: int
    """0 .. `num_ranks` - 1."""
    num_ranks: int
    local_rank: int
    """On its host; also the index of its GPU."""
    secret: bytes = b""

    def __repr__(self) -> str:
        return f"RankEnvironment(rank={self.rank}, num_ranks={self.num_ranks})"

    @classmethod
    def of(
        cls, environment: Mapping[str, str], allow_plain_text: Sequence[str] = ()
    ) -> "RankEnvironment":
        """Read the variables that torchrun, JobSet and others set.

        Args:
            environment: with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and, where
                there are several ranks, SECRET.
            allow_plain_text: Values of MASTER_ADDR off this machine that are allowed.

        Raises:
            ConfigError: One is missing or no number, the rank is not below the number of ranks,
                the port is none, or ranks would meet on a network that no setting names.

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
        secret = environment.get(SECRET, "")
        if num_ranks > 1:
            address = environment["MASTER_ADDR"]
            check_encrypted("trainer.ranks.MASTER_ADDR", f"tcp://{address}", allow_plain_text)
            if len(secret) < _SECRET_CHARACTERS_MIN:
                text = f"expected {_SECRET_CHARACTERS_MIN} characters or more, for all ranks alike"
                raise ConfigError(f"environment variable {SECRET}: {text}, got {len(secret)}")
        return cls(rank=rank, num_ranks=num_ranks, local_rank=local_rank, secret=secret.encode())


class _SecretStore(Store):
    """Where ranks meet: keys that only they can name, and values that only they can make."""

    def __init__(self, inner: Store, secret: bytes) -> None:
        super().__init__()
        self._inner, self._secret = inner, secret

    def _named(self, key: str) -> str:
        return _digest(self._secret, b"key", key.encode()).hex()

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        sealed = _digest(self._secret, key.encode(), data) + data
        self._inner.set(self._named(key), sealed)  # pyright: ignore[reportArgumentType]

    def get(self, key: str) -> bytes:
        return _opened(self._secret, key.encode(), self._inner.get(self._named(key)))

    def add(self, key: str, value: int) -> int:
        return self._inner.add(self._named(key), value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        given = () if timeout is None else (timeout,)
        self._inner.wait([self._named(key) for key in keys], *given)


def _meet(place: RankEnvironment, timeout: timedelta) -> Store:
    """Return the store at MASTER_ADDR, which rank 0 serves on that address alone."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun itself serves one.
    serves = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    listening: int | None = None
    if serves:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        server = socket.create_server((address, port), family=family)
        listening = server.detach()
    inner = TCPStore(address, port, place.num_ranks, serves, timeout, master_listen_fd=listening)
    return _SecretStore(inner, place.secret)


def _digest(secret: bytes, what: bytes, data: bytes) -> bytes:
    message = len(what).to_bytes(8, "big") + what + data
    return hmac.digest(secret, message, hashlib.sha256)


def _opened(secret: bytes, what: bytes, sealed: bytes) -> bytes:
    """Return what another rank sealed.

    Raises:
        CorruptDataError: Nobody with the secret made it for this place.

    """
    data = bytes(sealed[_DIGEST_BYTES:])
    if not hmac.compare_digest(sealed[:_DIGEST_BYTES], _digest(secret, what, data)):
        raise CorruptDataError("a rank's message was not made with the secret of the ranks")
    return data


class World:
    """The process group, as one rank sees it.

    Its methods are collective: all ranks call the same ones in the same order.
    """

    def __init__(
        self,
        environment: RankEnvironment,
        device: str,
        timeout_s: float,
        store: Store | None = None,
    ) -> None:
        """Join the process group.

        Args:
            environment: of this process; MASTER_ADDR and MASTER_PORT are read from `os.environ`.
            device: cpu or cuda.
            timeout_s: of joining, and of every collective operation.
            store: In which ranks find each other, instead of at MASTER_ADDR.

        Raises:
            DeviceUnavailableError: The device is not there.
            torch.distributed.DistError: The other ranks did not join in time.

        """
        self._secret, self._rounds = environment.secret, count()
        self.rank, self.num_ranks = environment.rank, environment.num_ranks
        self.device = open_device(device, "trainer.device", environment.local_rank)
        timeout = timedelta(seconds=timeout_s)
        places = {"rank": self.rank, "world_size": self.num_ranks, "timeout": timeout}
        if not dist.is_initialized():  # One that is alone may open several learners.
            place = store or _meet(environment, timeout)
            dist.init_process_group(_BACKENDS[device], store=place, **places)
        self.mesh: DeviceMesh = init_device_mesh(device, (self.num_ranks,))

    @classmethod
    def alone(cls, device: str) -> "World":
        """Return the world of a process that trains by itself."""
        only = RankEnvironment(rank=0, num_ranks=1, local_rank=0)
        return cls(only, device, _ALONE_S, HashStore())

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank; they must be picklable.

        Raises:
            CorruptDataError: One is not of a rank that knows the secret.

        """
        round_ = next(self._rounds)
        places = [f"{round_}/{rank}".encode() for rank in range(self.num_ranks)]
        data = pickle.dumps(value)
        mine = _digest(self._secret, places[self.rank], data) + data
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in places]
        dist.all_gather(sizes, torch.tensor([len(mine)]))
        longest = max(int(size) for size in sizes)
        if longest > _VALUE_BYTES_MAX:
            raise CorruptDataError(f"a rank announces {longest} bytes: at most {_VALUE_BYTES_MAX}")
        padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
        found = [torch.empty(longest, dtype=torch.uint8) for _ in places]
        dist.all_gather(found, padded)
        sealed = [
            each.numpy().tobytes()[: int(size)] for each, size in zip(found, sizes, strict=True)
        ]
        # Checked before anything is unpickled.
        opened = [_opened(self._secret, *pair) for pair in zip(places, sealed, strict=True)]
        return [pickle.loads(data) for data in opened]  # noqa: S301 - made with the secret.

    def close(self) -> None:
        """Leave the group; end the process with `os._exit` then, since gloo may abort at exit."""
        dist.destroy_process_group()
