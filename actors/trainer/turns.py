"""Turns of samples that are not settled yet: known by name, read when needed.

```
TurnSampled ─────▶ kept, within a bound ──┐
RolloutFinished ─▶ names of its turns ────┼─▶ load(sample) ─▶ check, train
LiveSampleJoined ▶ name of its request ───┘        │
                                   not kept: read from the log and the store
```
The bound keeps the trainer's memory independent of the size of the run.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from penstock.actors.runtime.vault import Vault
from penstock.actors.trainer.batching.manifests import trained_samples
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CodecError
from penstock.messages.feedback import LiveSampleJoined, owner_of
from penstock.messages.reading.trajectories import (
    Last,
    check_turn,
    load_turn,
    own_turns,
    read_live_turn,
    read_turn,
)
from penstock.messages.rollout import (
    EpisodeFiles,
    RolloutFinished,
    StoredTurn,
    Turn,
    TurnSampled,
)
from penstock.messages.task import Purpose
from penstock.messages.training import BatchManifest, SampleEntry

NUM_DONE_MAX = 1_000_000
"""Settled samples that are remembered, in case their last event is read after their manifest."""
_LOADS_MAX = 16
"""Turns read concurrently."""


class TurnStore:
    """Samples by rollout or request id; trajectories and manifests may arrive in either order."""

    saved = ("_samples", "_done")

    def __init__(self, num_bytes_max: int, opener: Vault) -> None:
        """Create an empty store.

        Args:
            num_bytes_max: Bytes of turns kept in memory; further turns are read again when
                needed.
            opener: Opens the sealed turns of users.

        """
        self._opener = opener
        self._num_bytes_max = num_bytes_max
        self._samples: dict[str, RolloutFinished | LiveSampleJoined] = {}
        self._done: OrderedDict[str, int] = OrderedDict()
        """Settled revision by sample; 0 for a rollout."""
        self._kept: OrderedDict[str, Turn | StoredTurn] = OrderedDict()
        """Turns by event key, least recently used first."""
        self._num_bytes = 0
        self._loads = asyncio.Semaphore(_LOADS_MAX)

    def add_turn(self, event: TurnSampled) -> None:
        """Keep a turn that may be trained."""
        if event.purpose is Purpose.TRAIN and event.rollout_id not in self._done:
            self._keep(event.key(), event.turn)

    def add(self, sample_id: str, event: RolloutFinished | LiveSampleJoined) -> None:
        """Keep the names of a sample's turns in its newest revision, unless it is settled."""
        revision = _revision(event)
        if revision <= self._done.get(sample_id, -1):
            return
        if (known := self._samples.get(sample_id)) and _revision(known) > revision:
            return
        if isinstance(event, RolloutFinished):
            # Files are the bulk of the event, and only judges read them.
            event = msgspec.structs.replace(event, files=EpisodeFiles())
        self._samples[sample_id] = event

    def has(self, manifest: BatchManifest) -> bool:
        """Return whether every sample that the manifest trains is known."""
        return all(sample.rollout_id in self._samples for sample in trained_samples(manifest))

    async def try_load(
        self, samples: Iterable[SampleEntry], store: ObjectStore, last: Last
    ) -> dict[str, Sequence[Turn] | CodecError]:
        """Read the turns of each sample, or the reason why they cannot be read.

        Raises:
            StoreUnreachableError: The store did not answer.

        """
        names = [sample.rollout_id for sample in samples]
        loads = (self._load(self._samples[name], store, last) for name in names)
        return dict(zip(names, await asyncio.gather(*loads), strict=True))

    async def load(
        self, samples: Iterable[SampleEntry], store: ObjectStore, last: Last
    ) -> dict[str, Sequence[Turn]]:
        """Read the turns of each sample.

        Raises:
            CodecError: Some cannot be read.
            StoreUnreachableError: The store did not answer.

        """
        loaded: dict[str, Sequence[Turn]] = {}
        for name, turns in (await self.try_load(samples, store, last)).items():
            if isinstance(turns, CodecError):
                raise turns
            loaded[name] = turns
        return loaded

    def drop(self, manifest: BatchManifest) -> None:
        """Forget every sample of a manifest."""
        for entry in _samples(manifest):
            sample = self._samples.get(entry.rollout_id)
            # A newer revision has arrived meanwhile and has yet to be trained.
            if sample is not None and _revision(sample) > entry.revision:
                continue
            self._done[entry.rollout_id] = entry.revision
            self._samples.pop(entry.rollout_id, None)
            if isinstance(sample, RolloutFinished):
                for index in range(len(sample.turns)):
                    self._forget(f"{sample.rollout_id}.{index}")
            if isinstance(sample, LiveSampleJoined):
                for request_id in sample.request_ids:
                    self._forget(request_id)
        while len(self._done) > NUM_DONE_MAX:
            self._done.popitem(last=False)

    def erase(self, tenant: str, user: str) -> None:
        """Drop a user's turns from memory, and the key that opens them."""
        self._opener.forget(owner_of(tenant, user))
        for sample in self._samples.values():
            if isinstance(sample, LiveSampleJoined) and (sample.tenant, sample.user) == (
                tenant,
                user,
            ):
                for request_id in sample.request_ids:
                    self._forget(request_id)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._samples)

    @property
    def num_bytes(self) -> int:
        """Bytes of turns in memory."""
        return self._num_bytes

    async def _load(
        self, sample: RolloutFinished | LiveSampleJoined, store: ObjectStore, last: Last
    ) -> Sequence[Turn] | CodecError:
        try:
            if isinstance(sample, LiveSampleJoined):
                indices = range(len(sample.turns))
                loads = (self._live_turn(sample, n, store, last) for n in indices)
                return await asyncio.gather(*loads)
            indices = range(len(sample.turns))
            turns = await asyncio.gather(*(self._turn(sample, n, store, last) for n in indices))
            return own_turns(sample, turns)
        except CodecError as error:
            return error

    async def _turn(
        self, rollout: RolloutFinished, index: int, store: ObjectStore, last: Last
    ) -> Turn:
        key = rollout.turn_key(index)
        async with self._loads:
            kept = self._kept.get(key)
            found = (
                check_turn(kept, rollout.turns[index], key)
                if kept is not None
                else await read_turn(last, rollout, index)
            )
            turn = await load_turn(store, found)
        self._keep(key, turn)
        return turn

    async def _live_turn(
        self, sample: LiveSampleJoined, index: int, store: ObjectStore, last: Last
    ) -> Turn:
        key = sample.request_ids[index]
        async with self._loads:
            turn = self._kept.get(key)
            if not isinstance(turn, Turn):
                turn = await read_live_turn(store, self._opener.open, last, sample, index)
        self._keep(key, turn)
        return turn

    def _keep(self, key: str, turn: Turn | StoredTurn) -> None:
        self._forget(key)
        self._kept[key] = turn
        self._num_bytes += _num_bytes(turn)
        # The newest turn itself goes if it alone exceeds the bound; it is read again when trained.
        while self._num_bytes > self._num_bytes_max:
            self._forget(next(iter(self._kept)))

    def _forget(self, key: str) -> None:
        turn = self._kept.pop(key, None)
        if turn is not None:
            self._num_bytes -= _num_bytes(turn)


def _revision(sample: RolloutFinished | LiveSampleJoined) -> int:
    return sample.revision if isinstance(sample, LiveSampleJoined) else 0


_HEAD_BYTES = 1024
"""Approximate size of a turn without its arrays."""


def _num_bytes(turn: Turn | StoredTurn) -> int:
    if isinstance(turn, StoredTurn):
        return _HEAD_BYTES
    arrays = (turn.context_ids, turn.token_ids, turn.behavior_logprobs)
    return (
        _HEAD_BYTES
        + sum(len(a.data) for a in arrays)
        + sum(map(len, (*turn.route_segments, *turn.support)))
    )


def _samples(manifest: BatchManifest) -> Iterable[SampleEntry]:
    for group in (*manifest.groups, *manifest.discarded):
        yield from group.samples
    yield from manifest.live
