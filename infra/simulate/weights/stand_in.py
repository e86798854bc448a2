"""A small model in a large one's place: real arrays, for all the code that looks into them.

```
 tensor 0  [ rank 0 | rank 1 | ... rank 7 ]  verifier 0       a row a rank, a tensor a verifier
 tensor 1  [ rank 8 | rank 9 | ...        ]  verifier 1
```
"""

import random

import numpy as np

from penstock.actors.sync_relay.publish.spans import Layout, Span
from penstock.kernels.element_types import TensorSpec
from penstock.messages.weights import Extent

ROW_ELEMENTS = 32
"""Of each rank."""
_NUM_CHANGED = 2
_ONE = 0x3F80
"""In bf16; all weights begin there."""


class StandIn:
    """The small model's weights, which change a little at every version."""

    def __init__(self, num_ranks: int, ranks_per_verifier: int, seed: int) -> None:
        groups = [
            range(first, min(first + ranks_per_verifier, num_ranks))
            for first in range(0, num_ranks, ranks_per_verifier)
        ]
        self.table = tuple(
            TensorSpec(f"layers.{number:05d}", "BF16", (len(group), ROW_ELEMENTS))
            for number, group in enumerate(groups)
        )
        self.spans = [
            Span(group[0] * ROW_ELEMENTS, (spec,))
            for group, spec in zip(groups, self.table, strict=True)
        ]
        self._rows = [np.full(ROW_ELEMENTS, _ONE, np.uint16) for _ in range(num_ranks)]
        self._dice = random.Random(f"stand-in/{seed}")

    def layout(self, rank: int) -> Layout:
        """Return what a rank holds: one shard of one run."""
        return [[Extent(rank * ROW_ELEMENTS, ROW_ELEMENTS)]]

    def step(self) -> list[np.ndarray]:
        """Take a step; return each rank's elements."""
        for row in self._rows:
            row[self._dice.sample(range(ROW_ELEMENTS), _NUM_CHANGED)] += 1
        return self._rows
