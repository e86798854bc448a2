"""Coding of the small model's arrays, in the time that the large model's would take."""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from tests.lab.regions.shaping import Bandwidth
from tests.lab.simulate.weights.settings import GB, Scenario
from tests.lab.simulate.weights.sized_store import SizedBytes
from tests.lab.simulate.weights.transfers import carry

from penstock.actors.relay.core.flat_snapshot import FlatSnapshot
from penstock.actors.relay.core.objects import (
    EncodedObject,
    ManifestHeader,
    ShardInput,
    encode_shard,
)
from penstock.actors.relay.publish.rank_attempt import Verification
from penstock.actors.relay.publish.spans import Layout, Span
from penstock.actors.relay.publish.verifier import SpanDecoder, UndoLog
from penstock.kernels.element_types import TensorSpec
from penstock.messages.weights import Extent

ROW_ELEMENTS = 32
"""Elements of each rank."""
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
        """Return a rank's layout: one shard of one run."""
        return [[Extent(rank * ROW_ELEMENTS, ROW_ELEMENTS)]]

    def step(self) -> list[np.ndarray]:
        """Take a step; return each rank's elements."""
        for row in self._rows:
            row[self._dice.sample(range(ROW_ELEMENTS), _NUM_CHANGED)] += 1
        return self._rows


_ITEM_BYTES = 2


async def in_place(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function at once: the virtual clock has no threads."""
    return function(*args)


class SizedEncoder:
    """One rank's encoder: a shard takes the time and the size of the rank's large part."""

    def __init__(self, scenario: Scenario, num_bytes: Callable[[], int]) -> None:
        """Args: `num_bytes` returns the size of its object of the current version."""
        self._num_bytes = num_bytes
        self._part_bytes = scenario.model_bytes // scenario.num_ranks
        self._processor = Bandwidth(scenario.encode_gb_s * GB)

    async def encode(self, header: ManifestHeader, shard: ShardInput) -> EncodedObject:
        """See `publish.upload.Encode`."""
        made = encode_shard(header, shard)
        await carry([self._processor], self._part_bytes)
        data = SizedBytes(made.data, self._num_bytes())
        ref = msgspec.structs.replace(made.ref, num_bytes=len(data))
        return msgspec.structs.replace(made, ref=ref, data=data)


class SizedDecoder(SpanDecoder):
    """One verifier's decoder: decoding and digesting take the large tensors' time."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(in_place)
        self._scale = scenario.model_bytes / (scenario.num_ranks * ROW_ELEMENTS * _ITEM_BYTES)
        self._decoder = Bandwidth(scenario.verifier_decode_gb_s * GB)
        self._digester = Bandwidth(scenario.verifier_digest_gb_s * GB)

    async def apply(
        self, flat: FlatSnapshot, runs: list[Extent], data: bytes, undo: UndoLog | None
    ) -> None:
        """See `SpanDecoder.apply`."""
        await self._pass(self._decoder, sum(run.num_elements for run in runs) * _ITEM_BYTES)
        await super().apply(flat, runs, bytes(memoryview(data)), undo)

    async def digest(self, name: str, array: np.ndarray, start: int) -> Verification:
        """See `SpanDecoder.digest`."""
        await self._pass(self._digester, array.nbytes)
        return await super().digest(name, array, start)

    async def _pass(self, processor: Bandwidth, num_bytes: int) -> None:
        await carry([processor], round(num_bytes * self._scale))
