"""Changed places as marks and changed values as steps, class by class.

```
 class c:  ranks of the changed ──▶ marks (3 streams)
           their steps ──▶ signs (1)   large ones ──▶ marks (3)   their sizes ──▶ bytes (2)
```
"""

from collections.abc import Iterator

import numpy as np

from penstock.kernels.delta import classes, gaps, ulp
from penstock.kernels.delta.header import (
    NUM_CLASSES_MAX,
    STREAMS_PER_CLASS,
    ClassRecord,
    Codec,
    Header,
)

Coded = tuple[tuple[ClassRecord, ...], list[bytes]]
"""The records and the plain streams of all classes."""


def encode_gap_ulp(
    codec: Codec, base: np.ndarray, target: np.ndarray, changed: np.ndarray
) -> Coded:
    """Code the changed places and their new values.

    Args:
        codec: whether to go by class.
        base: [N] bit patterns.
        target: [N] bit patterns.
        changed: [K] int64, where they differ, rising.

    """
    thresholds, populations, groups = [0], [base.size], [(changed, changed)]
    if codec is Codec.CLASS_GAP_ULP:
        keys = classes.exponent_keys(base)
        counts = classes.key_counts(keys)
        hits = np.bincount(keys[changed], minlength=classes.NUM_KEYS)
        thresholds = classes.choose_thresholds(counts.sum(axis=0), hits, NUM_CLASSES_MAX)
        grouping = classes.Grouping(keys, counts, thresholds)
        populations, groups = grouping.populations, grouping.ranks(base != target)
    records: list[ClassRecord] = []
    streams: list[bytes] = []
    for key, population, (ranks, places) in zip(thresholds, populations, groups, strict=True):
        marks, mark_streams = gaps.encode_marks(ranks, population)
        large, step_streams = _encode_steps(base[places], target[places])
        records.append(
            ClassRecord(first_key=key, num_changed=ranks.size, changed=marks, large=large)
        )
        streams += mark_streams + step_streams
    return tuple(records), streams


def _encode_steps(base: np.ndarray, target: np.ndarray) -> tuple[gaps.MarksRecord, list[bytes]]:
    is_down, sizes = ulp.steps_between(base, target)
    large = np.flatnonzero(sizes >= ulp.SMALLEST_LARGE)
    record, marks = gaps.encode_marks(large, sizes.size)
    return record, [gaps.pack_bits(is_down), *marks, *ulp.encode_sizes(sizes[large])]


def decode_gap_ulp(
    header: Header, base: np.ndarray, streams: list[bytes]
) -> tuple[np.ndarray, np.ndarray]:
    """Invert `encode_gap_ulp`: return the changed places [K], in no order, and their values.

    Raises:
        ValueError: the streams contradict the header or each other.

    """
    populations, grouping = [base.size], None
    if header.codec is Codec.CLASS_GAP_ULP:
        keys = classes.exponent_keys(base)
        thresholds = [record.first_key for record in header.classes]
        grouping = classes.Grouping(keys, classes.key_counts(keys), thresholds)
        populations = grouping.populations
    by_class = list(_streams_by_class(streams))
    ranks = [
        _decode_ranks(record, own, population)
        for record, own, population in zip(header.classes, by_class, populations, strict=True)
    ]
    places = ranks if grouping is None else grouping.places(ranks)
    values = [
        _decode_steps(record, own[gaps.STREAMS_PER_MARKS :], base[where])
        for record, own, where in zip(header.classes, by_class, places, strict=True)
    ]
    return np.concatenate(places), np.concatenate(values)


def _streams_by_class(streams: list[bytes]) -> Iterator[list[bytes]]:
    for first in range(0, len(streams), STREAMS_PER_CLASS):
        yield streams[first : first + STREAMS_PER_CLASS]


def _decode_ranks(record: ClassRecord, own: list[bytes], population: int) -> np.ndarray:
    ranks = gaps.decode_marks(record.changed, own[: gaps.STREAMS_PER_MARKS], population)
    if ranks.size != record.num_changed:
        raise ValueError(f"{ranks.size} ranks for {record.num_changed} changes")
    return ranks


def _decode_steps(record: ClassRecord, own: list[bytes], base: np.ndarray) -> np.ndarray:
    """Return the new values [k_c] of the class's changed elements."""
    signs, *marks, codes, escapes = own
    is_down = gaps.unpack_bits(np.frombuffer(signs, np.uint8), base.size)
    large = gaps.decode_marks(record.large, marks, base.size)
    sizes = np.ones(base.size, base.dtype)
    sizes[large] = ulp.decode_sizes(
        np.frombuffer(codes, np.uint8), np.frombuffer(escapes, base.dtype)
    )
    return ulp.walk(base, is_down, sizes)
