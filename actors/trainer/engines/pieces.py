"""Tensors of a checkpoint as objects of at most 64 MiB, written and read by any number of ranks.

```
 state of rank 0 ─▶ chunks ─▶ piece, piece ─┐
 state of rank 1 ─▶ chunks ─▶ piece ────────┴─▶ StoredTensors, in the checkpoint's head
```
torch.distributed.checkpoint plans who writes which box of each tensor, each box once, and which
boxes a rank reads, cut as it holds the tensors: 3 ranks load what 2 have saved. A piece is named by
its step and content, so that the same state stored again is the same object.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CorruptDataError
from penstock.messages.settings import NonNegativeInt, one_of

PIECE_PREFIX = "checkpoint-pieces/"
PIECE_BYTES_MAX = 64 << 20
_CONCURRENT = 4
"""Pieces in flight at once."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
}

T = TypeVar("T")
State = dict[str, torch.Tensor]
Gather = Callable[[Any], list[Any]]
"""Returns the values of all ranks, in their order; all ranks call it."""


class TensorBox(msgspec.Struct, frozen=True, array_like=True):
    """A box of one tensor, inside a piece."""

    tensor: str
    offsets: tuple[NonNegativeInt, ...]
    sizes: tuple[NonNegativeInt, ...]
    start: NonNegativeInt
    """First byte in the piece."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """One object."""

    object_key: str
    num_bytes: NonNegativeInt
    digest: str
    """xxh3-128 of the object."""
    chunks: list[TensorBox]


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A whole tensor."""

    dtype: Annotated[str, one_of(_DTYPES)]
    shape: tuple[NonNegativeInt, ...]


class StoredTensors(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint's head says of its tensors."""

    tensors: dict[str, StoredTensor]
    pieces: list[Piece]


def alone(value: T) -> list[T]:
    """Gather the value of the only rank there is."""
    return [value]


def plan_writes(state: State, rank: int, gather: Gather) -> list[tuple[str, tuple[int, ...], Any]]:
    """Return the boxes that a rank writes: tensor, offsets and values; all ranks call it.

    Args:
        state: Tensors, whole or as `DTensor`s; what several ranks hold is written once.
        rank: This one.
        gather: Of all ranks.

    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(state, is_coordinator=rank == 0)
    plans, _ = planner.create_global_plan(gather(planner.create_local_plan()))
    plan = planner.finish_plan(plans[rank])
    return [
        (item.index.fqn, tuple(item.index.offset or ()), planner.resolve_data(item))
        for item in plan.items
    ]


async def write_pieces(
    store: ObjectStore, step: int, writes: Iterable[tuple[str, tuple[int, ...], torch.Tensor]]
) -> list[Piece]:
    """Store a rank's boxes; nothing names the pieces until a head does.

    Raises:
        OSError: No room, say.

    """
    found: list[Piece] = []
    waiting: list[asyncio.Task[None]] = []
    try:
        for chunks, parts in _packed(writes):
            data = b"".join(parts)
            digest = xxhash.xxh3_128_hexdigest(data)
            key = f"{PIECE_PREFIX}{step:08d}-{digest}"
            found.append(Piece(object_key=key, num_bytes=len(data), digest=digest, chunks=chunks))
            waiting.append(asyncio.create_task(store.put(key, data)))
            if len(waiting) == _CONCURRENT:
                await waiting.pop(0)
        for each in waiting:
            await each
    finally:
        for each in waiting:
            each.cancel()
    return found


def stored_tensors(state: State, pieces: Iterable[Piece]) -> StoredTensors:
    """Describe a state that all ranks have stored."""
    tensors = {
        name: StoredTensor(dtype=str(each.dtype).removeprefix("torch."), shape=tuple(each.shape))
        for name, each in state.items()
    }
    return StoredTensors(tensors=tensors, pieces=list(pieces))


async def read_pieces(store: ObjectStore, stored: StoredTensors, target: State) -> None:
    """Fill the tensors of `target` with what is stored under their names.

    Args:
        store: Of the run.
        stored: From the checkpoint's head.
        target: Tensors, whole or as `DTensor`s, each of the stored shape and dtype. A rank reads
            the pieces alone that hold something of its own rows.

    Raises:
        NotFoundError: A piece is missing.
        CorruptDataError: A piece is damaged, or does not hold what the head says.

    """
    index = {
        MetadataIndex(chunk.tensor, chunk.offsets): (number, chunk)
        for number, piece in enumerate(stored.pieces)
        for chunk in piece.chunks
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        planner.set_up_planner(target, _metadata(stored, index), is_coordinator=False)
        plan = planner.create_local_plan()
    except (ValueError, RuntimeError) as error:
        raise CorruptDataError(f"checkpoint: {error}") from error
    by_piece: dict[int, list[ReadItem]] = {}
    for item in plan.items:
        by_piece.setdefault(index[item.storage_index][0], []).append(item)
    room = asyncio.Semaphore(_CONCURRENT)

    async def read(number: int) -> None:
        async with room:
            piece = stored.pieces[number]
            data = await store.get(piece.object_key)
            if len(data) != piece.num_bytes or xxhash.xxh3_128_hexdigest(data) != piece.digest:
                raise CorruptDataError(f"{piece.object_key}: the bytes do not match their digest")
            for item in by_piece[number]:
                chunk = index[item.storage_index][1]
                values = _values(data, chunk, stored.tensors[chunk.tensor], piece.object_key)
                box = zip(item.storage_offsets, item.lengths, strict=True)
                part = values[tuple(slice(at, at + size) for at, size in box)]
                planner.resolve_tensor(item).detach().copy_(part)

    try:
        async with asyncio.TaskGroup() as group:
            for number in by_piece:
                group.create_task(read(number))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _metadata(
    stored: StoredTensors, index: Mapping[MetadataIndex, tuple[int, TensorBox]]
) -> Metadata:
    """Describe stored tensors to the planner."""
    chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in stored.tensors}
    for _, chunk in index.values():
        box = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        chunks[chunk.tensor].append(box)
    return Metadata(
        state_dict_metadata={
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=_DTYPES[each.dtype]),
                size=torch.Size(each.shape),
                chunks=chunks[name],
            )
            for name, each in stored.tensors.items()
        }
    )


def _values(data: bytes, chunk: TensorBox, tensor: StoredTensor, key: str) -> torch.Tensor:
    dtype = _DTYPES[tensor.dtype]
    own = bytearray(data[chunk.start : chunk.start + math.prod(chunk.sizes) * dtype.itemsize])
    if not own or len(own) != math.prod(chunk.sizes) * dtype.itemsize:
        raise CorruptDataError(f"{key}: {chunk.tensor} is not all in it")
    return torch.frombuffer(own, dtype=dtype).reshape(chunk.sizes)


def _packed(
    writes: Iterable[tuple[str, tuple[int, ...], torch.Tensor]],
) -> Iterator[tuple[list[TensorBox], list[bytes]]]:
    """Yield the content of one piece after the other."""
    chunks: list[TensorBox] = []
    parts: list[bytes] = []
    num_bytes = 0
    for name, offsets, values in writes:
        for at, rows in _rows(offsets, values):
            data = rows.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            if chunks and num_bytes + len(data) > PIECE_BYTES_MAX:
                yield chunks, parts
                chunks, parts, num_bytes = [], [], 0
            chunks.append(TensorBox(name, at, tuple(rows.shape), num_bytes))
            parts.append(data)
            num_bytes += len(data)
    if chunks:
        yield chunks, parts


def _rows(
    offsets: Sequence[int], values: torch.Tensor
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yield a box as runs of whole rows that fit into a piece; a larger row is a run by itself."""
    if values.dim() == 0:
        yield (), values
        return
    num_rows = values.shape[0]
    row_bytes = max(1, values[0].numel() * values.element_size()) if num_rows else 1
    per_run = max(1, PIECE_BYTES_MAX // row_bytes)
    for first in range(0, num_rows, per_run):
        yield (offsets[0] + first, *offsets[1:]), values[first : first + per_run]
