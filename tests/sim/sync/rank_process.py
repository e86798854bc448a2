"""One trainer rank as a process of its own; a test speaks to it in lines.

`upload VERSION TOKEN` uploads its part of that version's weights and answers `uploaded VERSION` or
the error; `stall NUM` makes it hang, saying so, before it puts that many more objects.
"""

import asyncio
import sys
from pathlib import Path

import numpy as np
from tests.sim.sync.runs import find_runs

from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.rank_publisher import RankPublisher
from penstock.infra.stores.directory import DirectoryStore
from penstock.kernels.element_types import TensorSpec
from penstock.messages.errors import PenstockError

TABLE = (
    TensorSpec("layers.0.mlp", "BF16", (12, 8, 16)),
    TensorSpec("norm", "BF16", (33,)),
    TensorSpec("scale", "U32", (7, 3)),
)
"""By dtype and name, as flat coordinates run."""


def weights(version: int) -> dict[str, np.ndarray]:
    """Return the weights of a version, as every rank can compute them."""
    rng = np.random.default_rng(7)
    made = {
        spec.name: rng.integers(0, 1 << 16, spec.shape).astype(spec.element_type.storage)
        for spec in TABLE
    }
    for _ in range(version):
        for array in made.values():
            flat = array.reshape(-1)
            flat[rng.integers(0, flat.size, 3)] += 1
    return made


def boxes(rank: int, num_ranks: int) -> list[tuple[str, tuple[slice, ...]]]:
    """Return what a rank holds: columns of the first tensor, rows of the others."""
    held: list[tuple[str, tuple[slice, ...]]] = []
    for spec in TABLE:
        axis = 1 if len(spec.shape) == 3 else 0
        size = spec.shape[axis]
        share = slice(size * rank // num_ranks, size * (rank + 1) // num_ranks)
        held.append((spec.name, (slice(None),) * axis + (share,)))
    return held


class StallingStore(DirectoryStore):
    """Hangs in the middle of an upload when it is told to."""

    num_puts_left = -1

    async def put(self, key: str, data: bytes | memoryview) -> None:
        """See `ObjectStore.put`."""
        if self.num_puts_left == 0:
            print("stalled", flush=True)
            await asyncio.sleep(1e6)
        self.num_puts_left -= 1
        await super().put(key, data)


async def main(folder: str, rank: int, num_ranks: int) -> None:
    """Do what the test says, until it closes the pipe."""
    store = StallingStore(Path(folder))
    held = boxes(rank, num_ranks)
    layout = [find_runs(TABLE, name, box) for name, box in held]
    publisher = RankPublisher(StoreIO(store), rank, TABLE, layout)
    while line := await asyncio.to_thread(sys.stdin.readline):
        word, *numbers = line.split()
        if word == "stall":
            store.num_puts_left = int(numbers[0])
            continue
        version, token = map(int, numbers)
        whole = weights(version)
        parts = [np.ascontiguousarray(whole[name][box]).reshape(-1) for name, box in held]
        try:
            await publisher.upload(version, token, parts)
            print(f"uploaded {version}", flush=True)
        except PenstockError as error:
            print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
