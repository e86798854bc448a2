"""The command line: rounds until the wanted boots are done; a state file lets it go on later."""

import argparse
import asyncio
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec

from penstock.actors.runtime.files import write_atomic
from penstock.infra.orphans import adopt_orphans

from .round import run_round

BOOTS_PER_ROUND = 500


class State(msgspec.Struct):
    """What is done so far."""

    boots: int = 0
    rounds: int = 0
    wall_s: float = 0.0
    counts: dict[str, int] = {}


async def run(wanted: int, seed: int, state: State, file: Path | None) -> None:
    """Run the rounds that are missing."""
    while state.boots < wanted:
        began = time.monotonic()
        num_boots = min(BOOTS_PER_ROUND, wanted - state.boots)
        boots, counts = await run_round(f"s{seed}r{state.rounds}", num_boots)
        state.boots, state.rounds = state.boots + boots, state.rounds + 1
        state.counts = dict(sorted((Counter(state.counts) + counts).items()))
        state.wall_s += time.monotonic() - began
        if file is not None:
            write_atomic(file, msgspec.json.encode(state))
        print(f"round {state.rounds}: {state.boots}/{wanted} boots {state.counts}", flush=True)


def main() -> int:
    """Run; the last line is one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.boots")
    parser.add_argument("--boots", type=int, default=300)
    parser.add_argument("--state", type=Path, help="file to go on from, and to keep up to date")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when")
    arguments = parser.parse_args()
    state, file = State(), arguments.state
    if file is not None and file.exists():
        state = msgspec.json.decode(file.read_bytes(), type=State)
    adopt_orphans()
    asyncio.run(run(arguments.boots, arguments.seed, state, file))
    sys.stdout.write(msgspec.json.encode(state).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
