"""Publishes from a training rank: uploads the runs of tensors that it holds, and verifies a span.

```
 rows of a fused parameter ─▶ runs of published tensors ─▶ runs in flat coordinates ─▶ shards
```
"""

from collections.abc import Sequence

import numpy as np

from penstock.actors.policy.snapshot import TensorRun
from penstock.actors.relay.core.flat_snapshot import SHARD_ELEMENTS_MAX, Table
from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.rank_attempt import VERSION_S_MAX
from penstock.actors.relay.publish.rank_publisher import Parts, RankPublisher
from penstock.actors.relay.publish.spans import Layout, Span, cut_spans
from penstock.actors.relay.publish.verifier import SpanVerifier
from penstock.messages.reading.parsing import parse_msgpack
from penstock.messages.weights import Extent, UploadWeights


class HeldShardUploader:
    """A shard uploader for one rank that holds the same runs of tensors in every version."""

    def __init__(self, io: StoreIO, rank: int, num_ranks: int) -> None:
        """Initialize without reading anything."""
        self._io, self._rank, self._num_ranks = io, rank, num_ranks
        self._table: Table | None = None
        self._publisher: RankPublisher
        self._verifier: SpanVerifier
        self._spans: list[Span]

    async def upload(self, message: UploadWeights, runs: Sequence[TensorRun]) -> None:
        """Upload this rank's runs of a version and verify its span.

        Raises:
            StaleTokenError: Another committer took over.
            DeadlineError: The committer staged no manifest in time.
            ValueError: The runs are not within the table's tensors, or differ from those before.
            OSError: The store has no room.

        """
        table = parse_msgpack(message.tensor_table, Table, "tensor_table")
        spans = cut_spans(table, self._num_ranks)
        layout, parts = await self._io.offload(shards_of_runs, table, spans, runs)
        # The table is the same in every version of a run: base and snapshot are kept in between.
        if table != self._table:
            self._publisher = RankPublisher(self._io, self._rank, table, layout)
            self._verifier = SpanVerifier(self._io, self._rank, spans[self._rank])
            self._table = table
        version, token = message.policy_version, message.fencing_token
        await self._publisher.upload(version, token, parts)
        await self._verifier.verify(version, token, wait_s=VERSION_S_MAX)


def shards_of_runs(
    table: Table,
    spans: Sequence[Span],
    runs: Sequence[TensorRun],
    num_elements_max: int = SHARD_ELEMENTS_MAX,
) -> tuple[Layout, Parts]:
    """Return the layout of a rank's shards, each of one span and dtype, and their values.

    Raises:
        ValueError: A run is not within a tensor of the table.

    """
    starts = {name: start for span in spans for name, start in span.starts().items()}
    specs = {spec.name: spec for spec in table}
    places = {name: number for number, span in enumerate(spans) for name in span.starts()}
    layout: Layout = []
    parts: list[list[np.ndarray]] = []
    before: tuple[int, str] | None = None
    size = 0
    # In order of flat coordinates, so that neighboring small runs share a shard.
    for run in sorted(runs, key=lambda run: starts.get(run.name, 0) + run.start):
        spec = specs.get(run.name)
        if spec is None or run.start < 0 or run.start + run.values.size > spec.size:
            raise ValueError(
                f"weights: run of {run.values.size} elements of {run.name} from {run.start} is not"
                " within a tensor of the table"
            )
        kind = places[run.name], spec.dtype
        for at in range(0, run.values.size, num_elements_max):
            values = run.values[at : at + num_elements_max]
            # A verifier reads whole shards, so a shard must not cross its span; nor may it mix
            # dtypes, as it has one codec.
            if kind != before or size + values.size > num_elements_max:
                layout.append([])
                parts.append([])
                before, size = kind, 0
            layout[-1].append(Extent(starts[run.name] + run.start + at, values.size))
            parts[-1].append(values)
            size += values.size
    return layout, [np.concatenate(values) for values in parts]
