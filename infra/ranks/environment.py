"""The environment variables of ranks that start on one machine, as torchrun sets them."""

import os
import secrets
import socket
from collections.abc import Mapping, Sequence

from penstock.actors.trainer.config import TrainerConfig
from penstock.messages.errors import ConfigError


def is_rank(specs: Sequence[str]) -> bool:
    """Whether a process of these roles is a rank."""
    return any(spec.partition(":")[0] == "rank" for spec in specs)


def rank_environments(
    unit: Mapping[str, Sequence[str]], config: TrainerConfig
) -> dict[str, dict[str, str]]:
    """Return what each process of a unit gets beside the launcher's own environment.

    Ranks meet at a free port of this machine; where ranks are on several hosts, the launchers'
    MASTER_ADDR and MASTER_PORT say where, and PENSTOCK_RANKS_SECRET is the same for all.

    Args:
        unit: Process name -> roles.
        config: Of the trainer.

    Raises:
        ConfigError: Other ranks are elsewhere, and nothing says where to meet them.

    """
    found: dict[str, dict[str, str]] = {name: {} for name in unit}
    ranks = {name: specs[0].partition(":")[2] for name, specs in unit.items() if is_rank(specs)}
    if not ranks:
        return found
    has_place, num_ranks = "MASTER_ADDR" in os.environ, config.ranks.num_ranks
    if not has_place and len(ranks) < num_ranks:
        text = f"expected the host of rank 0, as {len(ranks)} of {num_ranks} ranks start here"
        raise ConfigError(f"environment variable MASTER_ADDR: {text}, it is not set")
    place = {} if has_place else _local_place()
    for local_rank, (name, rank) in enumerate(ranks.items()):
        found[name] = {
            "RANK": rank,
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(len(ranks)),
            **place,
        }
    return found


def _local_place() -> dict[str, str]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PENSTOCK_RANKS_SECRET": secrets.token_hex(32),
        "GLOO_SOCKET_IFNAME": "lo",
    }
