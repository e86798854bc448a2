"""Divides a snapshot among ranks and verifiers, in flat coordinates.

```
 table:    a ........ | b .... | c . d . e ............      tensors
 spans:    [ span 0            ][ span 1              ]      whole tensors, one verifier each
 ranks:    [ rank 0   ][ rank 1   ][ rank 2           ]      any partition
 shards:   [          ][       ][  ][                 ]      each in one rank, span and dtype
```
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from penstock.actors.relay.core.flat_snapshot import Table
from penstock.messages.errors import CorruptDataError
from penstock.messages.weights import Extent

Layout = list[list[Extent]]
"""Extents of each shard of one rank."""


class Span(NamedTuple):
    """Consecutive whole tensors, which one verifier reads back."""

    start: int
    """Flat coordinate of the first element."""
    table: Table

    @property
    def end(self) -> int:
        """Flat coordinate after the last element."""
        return self.start + sum(spec.size for spec in self.table)

    def starts(self) -> dict[str, int]:
        """Return the flat coordinate of each tensor's first element."""
        ends = accumulate((spec.size for spec in self.table), initial=self.start)
        return {spec.name: start for spec, start in zip(self.table, ends, strict=False)}

    def holds(self, runs: Sequence[Extent]) -> bool:
        """Return whether all of these extents lie within the span."""
        return all(
            self.start <= run.start and run.start + run.num_elements <= self.end for run in runs
        )

    def within(self, runs: Sequence[Extent]) -> list[Extent]:
        """Return extents with coordinates relative to the span's start."""
        return [Extent(run.start - self.start, run.num_elements) for run in runs]


def cut_spans(table: Table, num_spans: int) -> list[Span]:
    """Divide a table into spans of whole tensors, as equal as tensors allow; some may be empty."""
    total = sum(spec.size for spec in table)
    groups: list[list[int]] = [[] for _ in range(num_spans)]
    end = 0
    for row, spec in enumerate(table):
        # A tensor goes to the span that its middle falls into, which keeps spans consecutive.
        middle = end + spec.size // 2
        groups[min(num_spans - 1, middle * num_spans // max(total, 1))].append(row)
        end += spec.size
    spans: list[Span] = []
    start = 0
    for group in groups:
        spans.append(Span(start, tuple(table[row] for row in group)))
        start = spans[-1].end
    return spans


def check_cover(shards: Sequence[Sequence[Extent]], spans: Sequence[Span]) -> None:
    """Check that shards cover every element of the spans once, each shard within one span.

    Raises:
        CorruptDataError: Elements are missing or duplicated, or a shard is in several spans.

    """
    runs = sorted((run.start, run.num_elements) for shard in shards for run in shard)
    end = 0
    # The empty run at the end finds elements that are missing after the last shard.
    for start, num_elements in [*runs, (spans[-1].end, 0)]:
        if start != end:
            who = "no rank" if start > end else "two ranks"
            span = f"{min(start, end)} to {max(start, end)}"
            raise CorruptDataError(f"ranks: elements {span} came from {who}")
        end = start + num_elements
    for shard in shards:
        if not any(span.holds(shard) for span in spans):
            raise CorruptDataError(f"ranks: the shard at {shard[0]} crosses the spans of verifiers")
