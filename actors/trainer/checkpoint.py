"""Checkpoints of training: all of the learner, and the facts of its step, in one object.

The object is a safetensors file whose metadata hold a `CheckpointHead`. Stores put atomically, so a
checkpoint is there whole or not at all, and all digests are checked on loading. RL draws no
random numbers, and pending groups are folded again from the log, so that neither is kept: the
step is the whole position.
"""

import struct

import msgspec
import xxhash
from safetensors.torch import load, save

from penstock.actors.trainer.engines.protocol import Completed, Place
from penstock.actors.trainer.learner import Learner
from penstock.messages.base import FORMAT, check_format
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CodecError, CorruptDataError
from penstock.messages.reading.parsing import parse_json
from penstock.messages.training import (
    CheckpointSaved,
    LedgerRow,
    StepCompleted,
)

_PREFIX = "checkpoints/"
_HEAD = "head"


class CheckpointHead(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint knows of itself."""

    step: int
    """= policy version; 0 after mid-training."""
    weights_digest: str
    optimizer_digest: str
    completed: Completed
    """The fact that announces this version. Published again at a start from here, in case that the
    trainer died between saving and publishing; the bus refuses it where it is known."""
    ledger: dict[int, LedgerRow] = {}
    """Sampled tokens by fate and policy version, as the trainer saw them."""
    format: int = FORMAT


class _SafetensorsHead(msgspec.Struct):
    __metadata__: dict[str, str]


class _Versioned(msgspec.Struct):
    """The one field of a checkpoint's head that every version reads."""

    format: int = 1


async def save_checkpoint(
    place: Place,
    learner: Learner,
    completed: Completed,
    ledger: dict[int, LedgerRow],
) -> CheckpointSaved:
    """Store a checkpoint of the learner as it is; a step that has one keeps it."""
    step = completed.step if isinstance(completed, StepCompleted) else 0
    there = await place.store.keys(_step_prefix(step))
    if there:
        key = there[0]
    else:
        data = await place.offload(_encode, learner, step, completed, ledger)
        key = f"{_step_prefix(step)}{_digest(data)}"
        await place.store.put(key, data)
    return CheckpointSaved(step=step, object_key=key, weights_digest=completed.weights_digest)


async def load_checkpoint(store: ObjectStore, key: str, learner: Learner) -> CheckpointHead:
    """Put the learner where the checkpoint was.

    Raises:
        NotFoundError: No such object.
        CorruptDataError: Not a checkpoint, damaged, or of another policy.
        FormatError: Saved by a version of another format.

    """
    data = await store.get(key)
    if _digest(data) != key.rpartition("-")[2]:
        raise CorruptDataError(f"{key}: the bytes do not match the digest in the name")
    head = _read_head(data, key)
    learner.load_state(load(data))
    found = (learner.weights_digest(), learner.optimizer_digest())
    if found != (head.weights_digest, head.optimizer_digest):
        raise CorruptDataError(f"{key}: weights or moments do not match their digests")
    return head


async def load_reference(store: ObjectStore, learner: Learner) -> None:
    """Give the learner version 0 to compare with; a store without its checkpoint has none.

    Raises:
        CorruptDataError: The checkpoint is damaged, or of another policy.

    """
    key = await first_checkpoint(store)
    if key is None:
        return
    data = await store.get(key)
    if _digest(data) != key.rpartition("-")[2]:
        raise CorruptDataError(f"{key}: the bytes do not match the digest in the name")
    learner.take_reference(load(data))


async def newest_checkpoint(store: ObjectStore) -> str | None:
    """Return the key of the newest checkpoint, or None."""
    keys = await store.keys(_PREFIX)
    return keys[-1] if keys else None


async def first_checkpoint(store: ObjectStore) -> str | None:
    """Return the key of step 0's checkpoint, from which replay starts, or None."""
    keys = await store.keys(_step_prefix(0))
    return keys[0] if keys else None


async def next_checkpoint(store: ObjectStore, step: int) -> str | None:
    """Return the key of the oldest checkpoint of a step or of one after it, or None."""
    keys = await store.keys(_PREFIX)
    return next((key for key in keys if key >= _step_prefix(step)), None)


async def checkpoint_before(store: ObjectStore, step: int) -> str | None:
    """Return the key of the newest checkpoint of a step before this one, or None."""
    keys = [key for key in await store.keys(_PREFIX) if key < _step_prefix(step)]
    return keys[-1] if keys else None


async def drop_old_checkpoints(store: ObjectStore, num_kept: int) -> None:
    """Delete all but step 0's and the `num_kept` newest."""
    keys = [key for key in await store.keys(_PREFIX) if not key.startswith(_step_prefix(0))]
    for key in keys[:-num_kept]:
        await store.delete(key)


def _encode(
    learner: Learner,
    step: int,
    completed: Completed,
    ledger: dict[int, LedgerRow],
) -> bytes:
    head = CheckpointHead(
        step=step,
        weights_digest=learner.weights_digest(),
        optimizer_digest=learner.optimizer_digest(),
        completed=completed,
        ledger=ledger,
    )
    assert head.weights_digest == completed.weights_digest, "the learner moved on"
    return save(learner.state(), {_HEAD: msgspec.json.encode(head).decode()})


def _read_head(data: bytes, key: str) -> CheckpointHead:
    try:
        (size,) = struct.unpack_from("<Q", data)
        metadata = parse_json(data[8 : 8 + size], _SafetensorsHead, key).__metadata__
        check_format(parse_json(metadata[_HEAD], _Versioned, key).format, key)
        return parse_json(metadata[_HEAD], CheckpointHead, key)
    except (struct.error, CodecError, KeyError) as error:
        raise CorruptDataError(f"{key}: not a checkpoint: {error}") from error


def _step_prefix(step: int) -> str:
    return f"{_PREFIX}{step:08d}-"


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
