"""Readers of turns and files of rollouts and live samples, from the log and the object store."""

from collections.abc import Awaitable, Sequence
from typing import Protocol, TypeVar

import msgspec

from penstock.messages.base import Array, Claim, Event
from penstock.messages.bus import Bus, ObjectStore
from penstock.messages.errors import CodecError
from penstock.messages.feedback import InferenceRecorded, LiveSampleJoined
from penstock.messages.reading.claims import fetch
from penstock.messages.reading.parsing import parse_with
from penstock.messages.reading.sealed import Open, SealedTurn
from penstock.messages.rollout import (
    EpisodeFiles,
    RolloutFinished,
    StoredTurn,
    Turn,
    TurnSampled,
    TurnSummary,
)
from penstock.messages.task import FileState

E = TypeVar("E", bound=Event)

AnyTurn = TypeVar("AnyTurn", Turn | StoredTurn, SealedTurn | StoredTurn)

_sealed_turns = msgspec.msgpack.Decoder(SealedTurn)
_turns = msgspec.msgpack.Decoder(Turn)
_files = msgspec.msgpack.Decoder(EpisodeFiles)


class Last(Protocol):
    """Reads the newest stored event of a type and key, as `Context.last` does."""

    def __call__(self, event_type: type[E], key: str, /) -> Awaitable[E | None]:
        """Return the event, or None if there is none."""
        ...


async def load_turn(store: ObjectStore, turn: Turn | StoredTurn) -> Turn:
    """Return a turn, reading it from the store if it lies there.

    Raises:
        CodecError: The stored object is missing or is not that turn.
        StoreUnreachableError: The store did not answer.

    """
    if isinstance(turn, Turn):
        return turn
    loaded: Turn = parse_with(_turns, await fetch(store, turn), f"turn {turn.object_key}")
    # The ledger counts by the event's summary, so another turn must not take its place.
    if loaded.summary != turn.summary:
        raise CodecError(f"turn {turn.object_key}: stored tokens do not match its event's summary")
    return loaded


async def open_live_turn(
    store: ObjectStore, open_sealed: Open, turn: SealedTurn | StoredTurn, key: str
) -> Turn:
    """Return the decrypted turn of a request's record, reading it from the store if it lies there.

    Raises:
        ErasedError: The user's key was erased.
        CodecError: The stored object is missing or is not that turn.
        StoreUnreachableError: The object store or the key store did not answer.

    """
    # What the store holds is sealed, too; it is decrypted only in memory.
    sealed = turn
    if isinstance(sealed, StoredTurn):
        data = await fetch(store, sealed)
        sealed = parse_with(_sealed_turns, data, f"turn {sealed.object_key}")
    data = await open_sealed(sealed.sealed, key)
    opened: Turn = parse_with(_turns, data, f"turn of {key}")
    if opened.summary != turn.summary:
        raise CodecError(f"turn of {key}: stored tokens do not match its event's summary")
    return opened


async def load_files(store: ObjectStore, files: EpisodeFiles | Claim) -> EpisodeFiles:
    """Return what an episode changed; raises like `load_turn`."""
    if isinstance(files, EpisodeFiles):
        return files
    loaded: EpisodeFiles = parse_with(
        _files, await fetch(store, files), f"files {files.object_key}"
    )
    return loaded


def last_of(bus: Bus) -> Last:
    """Return a reader of the newest events on a bus."""

    async def last(event_type: type[E], key: str) -> E | None:
        delivery = await bus.last(event_type, key)
        # The bus cannot narrow the type of what it returns.
        event = delivery.event if delivery is not None else None
        return event if isinstance(event, event_type) else None

    return last


async def read_turn(last: Last, rollout: RolloutFinished, index: int) -> Turn | StoredTurn:
    """Return a rollout's turn from the event that holds it.

    Raises:
        CodecError: The log lacks the turn, or has one that differs from the rollout's summary.

    """
    key = rollout.turn_key(index)
    event = await last(TurnSampled, key)
    return check_turn(event.turn if event is not None else None, rollout.turns[index], key)


async def read_live_turn(
    store: ObjectStore, open_sealed: Open, last: Last, sample: LiveSampleJoined, index: int
) -> Turn:
    """Return a live sample's turn from its request's record; raises like `open_live_turn`."""
    key = sample.request_ids[index]
    event = await last(InferenceRecorded, key)
    found = check_turn(event.turn if event is not None else None, sample.turns[index], key)
    return await open_live_turn(store, open_sealed, found, key)


def check_turn(found: AnyTurn | None, expected: TurnSummary, key: str) -> AnyTurn:
    """Return a turn from the log if it matches the summary that an event gives.

    Raises:
        CodecError: The turn is missing or does not match.

    """
    if found is None:
        raise CodecError(f"turn {key}: missing from the log")
    if found.summary != expected:
        raise CodecError(f"turn {key}: the turn in the log does not match the expected summary")
    return found


def own_turns(rollout: RolloutFinished, turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns on which a rollout is trained; a branch's start where it left its trunk."""
    shared, own = turns[: rollout.num_trunk_turns], list(turns[rollout.num_trunk_turns :])
    if shared and own and not own[0].starts_segment:
        # The branch continues the trunk's last segment, which therefore becomes context of its
        # first turn; that turn's routes cover it because `Generate.routes_from` was 0.
        open_segment = segments(shared)[-1]
        past = [ids for turn in open_segment for ids in (turn.context_ids, turn.token_ids)]
        whole = _concatenate([*past, own[0].context_ids])
        own[0] = msgspec.structs.replace(own[0], context_ids=whole)
    return own


def segments(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Group turns by segment; each segment was sampled in its own context."""
    found: list[list[Turn]] = []
    for turn in turns:
        if turn.starts_segment or not found:
            found.append([])
        found[-1].append(turn)
    return found


def _concatenate(parts: list[Array]) -> Array:
    """Concatenate int32 arrays."""
    data = b"".join(part.data for part in parts)
    return Array(dtype="int32", shape=(len(data) // 4,), data=data)


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """Finished rollout with its turns and files."""

    finished: RolloutFinished
    turns: list[Turn]
    files: dict[str, bytes]
    """Changed and added files by path."""
    states: list[FileState] = []
    """What else changed, as in `EpisodeFiles.states`."""


async def read_turns(store: ObjectStore, last: Last, rollout: RolloutFinished) -> list[Turn]:
    """Read all turns of a rollout; raises like `read_trajectory`."""
    return [
        await load_turn(store, await read_turn(last, rollout, index))
        for index in range(len(rollout.turns))
    ]


async def read_trajectory(store: ObjectStore, last: Last, rollout: RolloutFinished) -> Trajectory:
    """Read a rollout's turns and files.

    Raises:
        CodecError: A turn or the files are missing or do not match the rollout.
        StoreUnreachableError: The store did not answer.

    """
    turns = await read_turns(store, last, rollout)
    files = await load_files(store, rollout.files)
    return Trajectory(finished=rollout, turns=turns, files=files.changed, states=files.states)
