"""A command as several processes of this machine that train together."""

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import Sequence

import msgspec

from penstock.actors.trainer.config import TrainerConfig
from penstock.infra.orphans import die_with_parent
from penstock.infra.ranks.environment import rank_environments
from penstock.infra.ranks.units import stop_processes


async def run_gang(arguments: Sequence[str], config: TrainerConfig, num_ranks: int) -> int:
    """Run `penstock ARGUMENTS` in ranks, of which rank 0 prints; return its exit code.

    A rank that fails ends the others, and its code is returned.
    """
    ranks = msgspec.structs.replace(config.ranks, num_ranks=num_ranks)
    unit = {f"rank-{rank}": [f"rank:{rank}"] for rank in range(num_ranks)}
    places = rank_environments(unit, msgspec.structs.replace(config, ranks=ranks))
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.infra.cli", *arguments),
            env=os.environ | place,
            stdout=None if place["RANK"] == "0" else DEVNULL,
            preexec_fn=die_with_parent,
        )
        for place in places.values()
    ]
    try:
        for ended in asyncio.as_completed([process.wait() for process in processes]):
            if code := await ended:
                return code
    finally:
        await stop_processes(processes)
    return 0
