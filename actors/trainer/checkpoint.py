"""Checkpoints of training: the whole state of the learner, and its step's event.

```
 checkpoint-pieces/<step>-<digest>   tensors, written by each rank (`engines/pieces.py`)
 checkpoints/<step>-<digest>         the head, written last: it completes the checkpoint
```
A process that dies before the head is stored leaves pieces that no head names; they are deleted
once a later step has a checkpoint. All digests are checked on loading. Random state and pending
groups are not saved: RL draws no random numbers, and the log has the groups.
"""

import logging
from collections.abc import Awaitable, Callable

import msgspec
import torch
import xxhash
from torch.distributed.tensor import DTensor

from penstock.actors.trainer.engines.pieces import (
    PIECE_PREFIX,
    Gather,
    State,
    StoredTensor,
    StoredTensors,
    alone,
    plan_writes,
    read_pieces,
    stored_tensors,
    write_pieces,
)
from penstock.actors.trainer.engines.protocol import Completed, HeldCheckpoint, Place
from penstock.actors.trainer.learner import Learner
from penstock.messages.base import FORMAT, check_format
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CodecError, CorruptDataError, NotFoundError
from penstock.messages.reading.parsing import parse_json
from penstock.messages.training import CheckpointSaved, LedgerRow, StepCompleted

log = logging.getLogger(__name__)

_PREFIX = "checkpoints/"
_WEIGHTS = "weights."


class CheckpointHead(msgspec.Struct, frozen=True, kw_only=True):
    """The head of a checkpoint."""

    step: int
    """Step, which is the policy version; 0 after mid-training."""
    weights_digest: str
    optimizer_digest: str
    completed: Completed
    """Event that announces this version. A trainer that resumes here publishes it again, in case
    its predecessor died before; the bus drops the duplicate."""
    ledger: dict[int, LedgerRow] = {}
    """Sampled tokens by fate, for each policy version."""
    stored: StoredTensors
    format: int = FORMAT


class _FormatField(msgspec.Struct):
    """The only field of a head that all versions can read."""

    format: int = 1


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks that share a learner; each function that takes them is a collective call."""

    rank: int = 0
    """Rank of this process."""
    gather: Gather = alone


ALONE = Ranks()


async def save_checkpoint(
    place: Place,
    learner: Learner,
    completed: Completed,
    ledger: dict[int, LedgerRow],
    ranks: Ranks = ALONE,
) -> CheckpointSaved:
    """Store a checkpoint of the learner, unless its step has one."""
    step = completed.step if isinstance(completed, StepCompleted) else 0
    # Rank 0's listing decides for all: ranks that disagreed would wait for each other forever.
    there = (await place.offload(ranks.gather, await place.store.keys(_step_prefix(step))))[0]
    if there:
        key = there[0]
    else:
        key = await _save(place, learner, completed, ledger, ranks)
        log.info("step %d: checkpoint %s stored", step, key)
    return CheckpointSaved(step=step, object_key=key, weights_digest=completed.weights_digest)


async def _save(
    place: Place,
    learner: Learner,
    completed: Completed,
    ledger: dict[int, LedgerRow],
    ranks: Ranks,
) -> str:
    step = completed.step if isinstance(completed, StepCompleted) else 0
    weights_digest = await place.offload(learner.weights_digest)
    # An engine does one thing at a time, so that nothing changes the learner in the meantime.
    assert weights_digest == completed.weights_digest, "the learner moved on"
    optimizer_digest = await place.offload(learner.optimizer_digest)
    state = learner.state()
    writes = await place.offload(plan_writes, state, ranks.rank, ranks.gather)
    own = await write_pieces(place.store, step, writes)
    # Gathering waits for all ranks: rank 0 stores the head only after every piece is stored.
    pieces = [each for part in await place.offload(ranks.gather, own) for each in part]
    head = CheckpointHead(
        step=step,
        weights_digest=weights_digest,
        optimizer_digest=optimizer_digest,
        completed=completed,
        ledger=ledger,
        stored=stored_tensors(state, pieces),
    )
    data = msgspec.json.encode(head)
    key = f"{_step_prefix(step)}{_digest(data)}"
    if ranks.rank == 0:
        await place.store.put(key, data)
    return (await place.offload(ranks.gather, key))[0]


async def load_checkpoint(place: Place, key: str, learner: Learner) -> CheckpointHead:
    """Restore the learner from a checkpoint; each rank restores its part.

    Raises:
        NotFoundError: The checkpoint or one of its pieces does not exist.
        CorruptDataError: The checkpoint is damaged, or belongs to another policy.
        FormatError: The checkpoint has another format version.

    """
    head = await read_head(place.store, key)
    target = _allocated(learner, head.stored.tensors)
    await read_pieces(place.store, head.stored, target)
    await place.offload(learner.load_state, target)
    # Pieces have digests of their own; these also cover how they were put together.
    found = (
        await place.offload(learner.weights_digest),
        await place.offload(learner.optimizer_digest),
    )
    if found != (head.weights_digest, head.optimizer_digest):
        raise CorruptDataError(f"{key}: weights or moments do not match their digests")
    log.info("resuming from checkpoint %s, step %d", key, head.step)
    return head


async def load_reference(place: Place, learner: Learner) -> None:
    """Load version 0 into the learner as its reference, if the store has its checkpoint.

    Raises:
        CorruptDataError: The checkpoint is damaged, or belongs to another policy.

    """
    key = await first_checkpoint(place.store)
    if key is not None:
        learner.take_reference(await _read_weights(place.store, key, learner))


async def read_policy_weights(store: ObjectStore, key: str) -> State:
    """Return the weights of a checkpoint by parameter; raises what `load_checkpoint` raises."""
    stored = (await read_head(store, key)).stored
    target = {
        name: torch.empty(each.shape, dtype=getattr(torch, each.dtype))
        for name, each in stored.tensors.items()
        if name.startswith(_WEIGHTS)
    }
    await read_pieces(store, stored, target)
    return {name.removeprefix(_WEIGHTS): value for name, value in target.items()}


async def _read_weights(store: ObjectStore, key: str, learner: Learner) -> State:
    stored = (await read_head(store, key)).stored
    weights = {name: each for name, each in stored.tensors.items() if name.startswith(_WEIGHTS)}
    target = _allocated(learner, weights)
    await read_pieces(store, stored, target)
    return target


def _allocated(learner: Learner, tensors: dict[str, StoredTensor]) -> State:
    """Return empty tensors for stored ones, sharded as the learner's parameters.

    Raises:
        CorruptDataError: The shapes are not this policy's.

    """
    parameters = dict(learner.policy.named_parameters())
    found: State = {}
    for name, each in tensors.items():
        kind, _, rest = name.partition(".")
        parameter = parameters.get(rest if kind == "weights" else rest.partition(".")[2])
        is_whole = parameter is not None and tuple(parameter.shape) == each.shape
        # Optimizer state has the shape of its parameter, or is a scalar such as the step.
        if parameter is None or not (is_whole or not each.shape):
            raise CorruptDataError("checkpoint: expected the tensors of this policy's shape")
        dtype = getattr(torch, each.dtype)
        like = parameter.detach()
        found[name] = (
            torch.empty_like(like, dtype=dtype)
            if isinstance(like, DTensor) and is_whole
            else torch.empty(each.shape, dtype=dtype)
        )
    return found


async def newest_checkpoint(store: ObjectStore) -> str | None:
    """Return the key of the newest checkpoint, or None."""
    keys = await store.keys(_PREFIX)
    return keys[-1] if keys else None


async def load_newest(
    store: ObjectStore, load: Callable[[str], Awaitable[HeldCheckpoint]]
) -> HeldCheckpoint | None:
    """Load the newest sound checkpoint; None if there is none at all.

    What is damaged or incomplete is deleted once an older one is loaded: the steps that follow,
    which the log has, save theirs anew.

    Raises:
        CorruptDataError: All are damaged, or incomplete.

    """
    damaged: list[str] = []
    fault: CorruptDataError | NotFoundError | None = None
    for key in reversed(await store.keys(_PREFIX)):
        try:
            held = await load(key)
        except (CorruptDataError, NotFoundError) as error:
            log.warning("checkpoint %s is unusable, trying the one before: %s", key, error)
            damaged.append(key)
            fault = error
            continue
        for each in damaged:
            await _delete_checkpoint(store, each)
        return held
    if fault is not None:
        raise CorruptDataError(f"none of {len(damaged)} checkpoints is sound: {fault}") from fault
    return None


async def _delete_checkpoint(store: ObjectStore, key: str) -> None:
    step = _step_of(key, _PREFIX)
    await store.delete(key)  # First: a head never lacks a piece.
    for piece in await store.keys(PIECE_PREFIX):
        if _step_of(piece, PIECE_PREFIX) == step:
            await store.delete(piece)


async def first_checkpoint(store: ObjectStore) -> str | None:
    """Return the key of the checkpoint of step 0, where replay starts, or None."""
    keys = await store.keys(_step_prefix(0))
    return keys[0] if keys else None


async def next_checkpoint(store: ObjectStore, step: int) -> str | None:
    """Return the key of the first checkpoint at or after a step, or None."""
    keys = await store.keys(_PREFIX)
    return next((key for key in keys if key >= _step_prefix(step)), None)


async def checkpoint_before(store: ObjectStore, step: int) -> str | None:
    """Return the key of the newest checkpoint before a step, or None."""
    keys = [key for key in await store.keys(_PREFIX) if key < _step_prefix(step)]
    return keys[-1] if keys else None


async def drop_old_checkpoints(store: ObjectStore, num_kept: int) -> None:
    """Keep the checkpoint of step 0 and the `num_kept` newest; delete others and stray pieces."""
    keys = await store.keys(_PREFIX)
    later = [key for key in keys if not key.startswith(_step_prefix(0))]
    dropped = later[:-num_kept]
    for key in dropped:
        await store.delete(key)  # Heads before pieces, so that no head lacks a piece.
    kept = {_step_of(key, _PREFIX) for key in keys if key not in dropped}
    for key in await store.keys(PIECE_PREFIX):
        step = _step_of(key, PIECE_PREFIX)
        # Pieces after the newest checkpoint may belong to one that is being saved.
        if step not in kept and step < max(kept, default=0):
            await store.delete(key)


async def read_head(store: ObjectStore, key: str) -> CheckpointHead:
    """Read the head of a checkpoint; raises what `load_checkpoint` raises."""
    data = await store.get(key)
    if _digest(data) != key.rpartition("-")[2]:
        raise CorruptDataError(f"{key}: the bytes do not match the digest in the name")
    try:
        check_format(parse_json(data, _FormatField, key).format, key)
        return parse_json(data, CheckpointHead, key)
    except CodecError as error:
        text = f"{key}: not a checkpoint of this build (runs of earlier ones cannot be continued)"
        raise CorruptDataError(f"{text}: {error}") from error


def _step_of(key: str, prefix: str) -> int:
    return int(key.removeprefix(prefix).partition("-")[0])


def _step_prefix(step: int) -> str:
    return f"{_PREFIX}{step:08d}-"


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
