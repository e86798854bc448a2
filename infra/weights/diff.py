"""Writes the delta between two checkpoints.

Several threads encode extents, which are written in order. Memory holds, per thread plus one, the
words of an extent in base and target and the codec's buffers, but never a whole tensor.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from penstock.infra.weights.coding import encode_words
from penstock.infra.weights.files.delta_file import DeltaWriter
from penstock.infra.weights.files.manifest import (
    ExtentRecord,
    File,
    Manifest,
    TargetRow,
    TensorRow,
    TensorSlice,
)
from penstock.infra.weights.files.output import new_file
from penstock.infra.weights.files.tensors import Key, Tensor, Weights
from penstock.kernels import delta
from penstock.kernels.digest import TensorHasher

EXTENT_WORDS = 1 << 21
"""Half of the format's maximum: 0.3 % larger deltas, but half the memory per thread."""
Advance = Callable[[int], None]
"""Function that is called with the number of finished bytes of the target."""


class DeltaSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a delta and of its target."""

    num_bytes: int
    target_bytes: int
    num_changed: int
    num_words: int

    @property
    def ratio(self) -> float:
        """Size of the target divided by the size of the delta."""
        return self.target_bytes / self.num_bytes


class _CodedExtent(msgspec.Struct, frozen=True):
    payload: bytes
    codec: str
    num_changed: int
    has_half_bytes: bool
    """Whether `num_changed` counts half bytes."""
    base: list[np.ndarray]
    """Words of each slice."""
    target: list[np.ndarray]


def write_delta(
    base: Weights, target: Weights, output: Path, *, num_threads: int, advance: Advance
) -> DeltaSummary:
    """Write the delta from `base` to `target`.

    Raises:
        CorruptDataError: A checkpoint was truncated while it was read.
        OSError: Writing failed; nothing is left behind.

    """
    job = _Job(base, target)
    with new_file(output) as file:
        writer = DeltaWriter(file)
        extents: list[ExtentRecord] = []
        for run, coded in zip(
            job.runs, ordered_map(job.encode, job.runs, num_threads), strict=True
        ):
            extents.append(
                ExtentRecord(
                    run[0].row,
                    run[0].first_word,
                    sum(piece.num_words for piece in run),
                    coded.num_changed,
                    coded.codec,
                    len(coded.payload),
                    writer.append(coded.payload),
                )
            )
            advance(job.record(run, coded))
        manifest = job.manifest(tuple(extents))
        writer.finish(manifest)
    return DeltaSummary(
        num_bytes=writer.num_bytes,
        target_bytes=sum(row.num_bytes for row in manifest.target),
        num_changed=sum(row.num_changed for row in manifest.target),
        num_words=sum(row.num_words for row in manifest.target),
    )


class _Job:
    """State of one diff."""

    def __init__(self, base: Weights, target: Weights) -> None:
        self._base, self._target = base, target
        # Tensors of one type next to each other, so that small ones can share an extent.
        self._tensors = sorted(
            target.tensors.values(), key=lambda t: (t.dtype, not self._is_based(t), t.name)
        )
        self.runs = list(plan_runs(self._tensors, self._is_based))
        self._hashers = [tensor.hasher() for tensor in self._tensors]
        self._base_hashers = {key: tensor.hasher() for key, tensor in base.tensors.items()}
        self._num_changed = [0] * len(self._tensors)

    def encode(self, run: list[TensorSlice]) -> _CodedExtent:
        """Encode one run of words; called from several threads."""
        tensors = [self._tensors[piece.row] for piece in run]
        base = [
            read_base(self._base, tensor, piece) for tensor, piece in zip(tensors, run, strict=True)
        ]
        target = [
            self._target.read(tensor.key, piece.first_word, piece.num_words)
            for tensor, piece in zip(tensors, run, strict=True)
        ]
        payload = encode_words(joined(base), joined(target), tensors[0].element_type.dtype)
        header = delta.read_header(payload)
        codec, has_half_bytes = header.codec.name.lower(), header.dtype is delta.Dtype.INT4X2
        return _CodedExtent(payload, codec, header.num_changed, has_half_bytes, base, target)

    def record(self, run: list[TensorSlice], coded: _CodedExtent) -> int:
        """Add an encoded run to digests and counts, in order; return its size in bytes."""
        for piece, old, new in zip(run, coded.base, coded.target, strict=True):
            self._hashers[piece.row].update(new)
            if self._is_based(self._tensors[piece.row]):
                self._base_hashers[self._tensors[piece.row].key].update(old)
            # The codec counts over the whole run, which is only exact for a run of one tensor.
            is_counted = len(run) == 1 and not coded.has_half_bytes
            changed = coded.num_changed if is_counted else int(np.count_nonzero(old != new))
            self._num_changed[piece.row] += changed
        return sum(words.nbytes for words in coded.target)

    def manifest(self, extents: tuple[ExtentRecord, ...]) -> Manifest:
        """Return the manifest, once all runs are recorded."""
        numbers = {tensor.key: number for number, tensor in enumerate(self._tensors)}
        target = tuple(
            TargetRow(t.name, t.dtype, t.shape, hasher.digest(), num_changed)
            for t, hasher, num_changed in zip(
                self._tensors, self._hashers, self._num_changed, strict=True
            )
        )
        return Manifest(
            is_folder=self._target.is_folder,
            base=tuple(self._base_rows(numbers)),
            target=target,
            files=tuple(
                File(file.path, tuple(numbers[key] for key in file.keys))
                for file in self._target.files
            ),
            extents=extents,
        )

    def _base_rows(self, numbers: dict[Key, int]) -> Iterator[TensorRow]:
        for key, tensor in sorted(self._base.tensors.items()):
            hasher = self._base_hashers[key]
            # Removed or replaced tensors are in no run, so their digest is computed here.
            if key not in numbers or not tensor.is_base_of(self._tensors[numbers[key]]):
                hash_whole(self._base, tensor, hasher)
            yield TensorRow(tensor.name, tensor.dtype, tensor.shape, hasher.digest())

    def _is_based(self, tensor: Tensor) -> bool:
        base = self._base.tensors.get(tensor.key)
        return base is not None and base.is_base_of(tensor)


def plan_runs(
    tensors: list[Tensor], is_based: Callable[[Tensor], bool]
) -> Iterator[list[TensorSlice]]:
    """Split sorted tensors into extents; small neighbors of one element type share an extent."""
    run: list[TensorSlice] = []
    kind = None
    room = 0
    for row, tensor in enumerate(tensors):
        first, rest = 0, tensor.num_words
        while rest:
            own = (tensor.dtype, is_based(tensor))
            if run and (own != kind or rest > room):
                yield run
                run = []
            # A new run has the whole room.
            room = room if run else EXTENT_WORDS
            kind, count = own, min(rest, room)
            run.append(TensorSlice(row, first, count))
            first, rest, room = first + count, rest - count, room - count
    if run:
        yield run


def read_base(base: Weights, tensor: Tensor, piece: TensorSlice) -> np.ndarray:
    """Read the base words of a slice; zeros if the base does not have the tensor."""
    own = base.tensors.get(tensor.key)
    if own is None or not own.is_base_of(tensor):
        return np.zeros(piece.num_words, tensor.word_dtype)
    return base.read(tensor.key, piece.first_word, piece.num_words)


def joined(parts: list[np.ndarray]) -> np.ndarray:
    """Concatenate slices; a single one is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def hash_whole(weights: Weights, tensor: Tensor, hasher: TensorHasher) -> None:
    """Hash a whole tensor, `EXTENT_WORDS` at a time."""
    for first in range(0, tensor.num_words, EXTENT_WORDS):
        hasher.update(weights.read(tensor.key, first, min(EXTENT_WORDS, tensor.num_words - first)))


Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(
    work: Callable[[Item], Result], items: Iterable[Item], num_threads: int
) -> Iterator[Result]:
    """Yield `work(item)` in order, computed by threads with at most `num_threads + 1` pending."""
    pending: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(num_threads)
    try:
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) > num_threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        # Also if the consumer stops early: no thread may read files that are about to be closed.
        pool.shutdown(cancel_futures=True)
