"""One stay of a run on a machine, in a process of its own: `python -m ... FILE run|replay [KILL]`.

Torch chooses its kernels once, from `ATEN_CPU_CAPABILITY`, so another machine is another process.
"""

import asyncio
import contextlib
import json
import pickle
import sys
from pathlib import Path

import msgspec
from tests.sealed import open_vault
from tests.sim.trainer.conftest import Killed, World, small_config

from penstock.actors.trainer.machine import arithmetic
from penstock.actors.trainer.replay import ReplayLog, replay


def main() -> None:
    path, action, *rest = sys.argv[1:]
    file = Path(path)
    world = pickle.loads(file.read_bytes()) if file.exists() else None
    world = world or World(0, small_config(steps_max=6, checkpoint_steps=2, checkpoints_kept=9))
    figures = {"arithmetic": arithmetic()}
    if action == "run":
        world.log.num_until_kill = float(rest[0]) if rest else float("inf")
        with contextlib.suppress(Killed):
            asyncio.run(world.run_once())
        file.write_bytes(pickle.dumps(world))
    else:
        log = ReplayLog(
            deliveries=world.log.follow(),
            last=world.log.last,
            store=world.store,
            opener=open_vault(),
        )
        report = asyncio.run(replay(log, world.policy, world.config))
        figures |= msgspec.to_builtins(report)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
