"""The engine whose weights are in ranks: requests, and a new start of all of them after a failure.

```
 step(n) ─▶ do the ranks hold version n-1? ─yes─▶ TakeStep(n) to all ─▶ StepTaken of rank 0
                     │ no: they started again                 │ error, silence
                     ▼                                        ▼
   new session: JoinRank, LoadRank(newest checkpoint),  ◀─────┘
   TakeStep again for each manifest since; the digests must be those of before
```
This process holds no weights: neither do its restarts lose any, nor does it need memory for them.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.hf.stored import published_config
from penstock.actors.policy.snapshot import PublishShards, ShardedVersion
from penstock.actors.runtime.context import Context
from penstock.actors.trainer.checkpoint import checkpoint_before, first_checkpoint, read_head
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.engines.protocol import (
    Completed,
    HeldCheckpoint,
    Place,
    ReadStepData,
)
from penstock.actors.trainer.off_policy import OffPolicy
from penstock.actors.trainer.step import StepResult
from penstock.messages.base import Message
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import (
    BusError,
    CorruptDataError,
    DeadlineError,
    NotFoundError,
    PublishConflictError,
    RemoteCallError,
)
from penstock.messages.requests.ranks import (
    JoinRank,
    LoadRank,
    MakeVersion0,
    MeasureSamples,
    RankLoaded,
    RankSaved,
    SamplesMeasured,
    SaveRank,
    StepTaken,
    TakeStep,
    rank_service,
)
from penstock.messages.rollout import Turn
from penstock.messages.rpc import RemoteErrorKind
from penstock.messages.training import BatchManifest, CheckpointSaved, LedgerRow, SampleEntry
from penstock.messages.weights import WeightsPublished

log = logging.getLogger(__name__)

_IDLE_S = 15.0
"""A rank that is silent for so long is dead, hung or starting."""
_PAUSE_S = 1.0
StreamRequest = Callable[..., AsyncIterator[Message]]
"""`Bus.stream_request`."""
R = TypeVar("R")
M = TypeVar("M", bound=Message)


class RankedEngine:
    """A `TrainingEngine` that requests everything of the ranks."""

    def __init__(
        self,
        policy_config: PolicyConfig,
        config: TrainerConfig,
        request: StreamRequest,
        publish_shards: PublishShards | None = None,
    ) -> None:
        """Prepare; no rank is needed yet.

        Args:
            policy_config: Shape of the policy.
            config: Of the run.
            request: Sends a message to a rank's service.
            publish_shards: None where no version is published: in a replay, say.

        """
        self._policy_config = policy_config
        self._ranks = config.ranks
        self._request = request
        self._publish_shards = publish_shards
        self._session = ""
        """Empty: the ranks have to load."""
        self._step = -1
        """Version that the ranks hold."""
        self._digests: dict[int, str] = {}
        """Of the versions since the newest checkpoint."""
        self._shapes: Mapping[str, Sequence[int]] = {}
        self._float32: Sequence[str] = ()
        self._probe: Sequence[float] = ()

    async def make_version_0(self, ctx: Context, seed: int) -> HeldCheckpoint:
        """Have the ranks make version 0, and load it; see `TrainingEngine.make_version_0`."""

        async def make() -> str:
            if key := await first_checkpoint(ctx.store):
                return key
            session = await self._joined()
            request = MakeVersion0(session=session, seed=seed)
            together = self._ranks.model == "transformers"
            saved = (
                await self._ask_all(request, RankSaved)
                if together
                else await self._ask(0, request, RankSaved)
            )
            self._session = session
            return saved.object_key

        return await self.load(ctx, await self._attempts(make))

    async def load(self, place: Place, object_key: str) -> HeldCheckpoint:
        """Have all ranks load a checkpoint; see `TrainingEngine.load`."""
        head = await read_head(place.store, object_key)

        async def load() -> None:
            await self._load(object_key)

        self._digests.clear()
        await self._attempts(load)
        digest = head.weights_digest
        saved = CheckpointSaved(step=head.step, object_key=object_key, weights_digest=digest)
        return HeldCheckpoint(completed=head.completed, saved=saved)

    async def step(
        self, place: Place, manifest: BatchManifest, config: TrainerConfig, read: ReadStepData
    ) -> StepResult:
        """Have all ranks take a step; see `TrainingEngine.step`. They read its data themselves."""
        taken = await self._at(place.store, manifest.step - 1, lambda: self._take(manifest.step))
        return msgspec.convert(taken, StepResult, from_attributes=True)

    async def measure(
        self,
        place: Place,
        samples: Sequence[SampleEntry],
        turns: Mapping[str, Sequence[Turn]],
        config: TrainerConfig,
    ) -> dict[str, OffPolicy]:
        """Measure live samples; see `TrainingEngine.measure`."""
        step = self._step

        async def ask() -> SamplesMeasured:
            request = MeasureSamples(
                session=self._session, policy_version=step, samples=list(samples)
            )
            return await self._ask_all(request, SamplesMeasured)

        found = (await self._at(place.store, step, ask)).figures
        return {name: OffPolicy(ess=each.ess, ratio=each.ratio) for name, each in found.items()}

    async def publish(self, place: Place, policy_version: int) -> WeightsPublished:
        """Have the ranks upload their shards; see `TrainingEngine.publish`."""
        publish = self._publish_shards
        assert publish is not None, "an engine that publishes nothing"
        text = await published_config(place.store, self._policy_config)
        return await self._at(
            place.store,
            policy_version,
            lambda: publish(
                ShardedVersion(policy_version, self._shapes, self._float32, text, self._probe)
            ),
        )

    async def save(
        self, place: Place, completed: Completed, ledger: dict[int, LedgerRow]
    ) -> CheckpointSaved:
        """Have all ranks store a checkpoint; see `TrainingEngine.save`."""
        step = self._step

        async def ask() -> RankSaved:
            request = SaveRank(session=self._session, completed=completed, ledger=ledger)
            return await self._ask_all(request, RankSaved)

        saved = await self._at(place.store, step, ask)
        self._digests.clear()
        return CheckpointSaved(
            step=step, object_key=saved.object_key, weights_digest=completed.weights_digest
        )

    async def _at(self, store: ObjectStore, step: int, work: Callable[[], Awaitable[R]]) -> R:
        """Do something while the ranks hold a version; raises as `_attempts`."""

        async def attempt() -> R:
            if not self._session or self._step != step:
                await self._bring_to(store, step)
            return await work()

        return await self._attempts(attempt)

    async def _bring_to(self, store: ObjectStore, step: int) -> None:
        """Load the newest checkpoint up to a version, and take the steps after it again.

        Raises:
            CorruptDataError: They gave other weights than before.

        """
        key = await checkpoint_before(store, step + 1)
        if key is None:
            raise NotFoundError(f"checkpoints/: none up to step {step}")
        await self._load(key)
        while self._step < step:
            await self._take(self._step + 1)

    async def _take(self, step: int) -> StepTaken:
        taken = await self._ask_all(TakeStep(session=self._session, step=step), StepTaken)
        known = self._digests.setdefault(step, taken.weights_digest)
        if known != taken.weights_digest:
            text = f"trained to weights {taken.weights_digest} again, {known} before"
            raise CorruptDataError(f"step {step}: {text}")
        self._step, self._probe = step, taken.probe
        return taken

    async def _load(self, object_key: str) -> None:
        session = self._session or await self._joined()
        loaded = await self._ask_all(LoadRank(session=session, object_key=object_key), RankLoaded)
        self._step, self._session = loaded.step, session
        self._shapes, self._float32 = loaded.shapes, loaded.float32
        self._probe = loaded.probe

    async def _joined(self) -> str:
        """Begin a session with all ranks, which starts those of another one again; return it.

        Raises:
            DeadlineError: Some ranks did not answer in `trainer.ranks.start_s_max`.

        """
        self._session, session = "", secrets.token_hex(8)
        missing = set(range(self._ranks.num_ranks))
        try:
            async with asyncio.timeout(self._ranks.start_s_max):
                while missing:
                    found = await asyncio.gather(*(self._join(rank, session) for rank in missing))
                    missing -= {rank for rank, has_joined in found if has_joined}
                    if missing:
                        await asyncio.sleep(_PAUSE_S)
        except TimeoutError as error:
            text = f"ranks {sorted(missing)} did not answer in trainer.ranks.start_s_max"
            raise DeadlineError(f"{text} {self._ranks.start_s_max:g} s") from error
        return session

    async def _join(self, rank: int, session: str) -> tuple[int, bool]:
        try:
            async for _ in self._request(
                rank_service(rank), JoinRank(session=session), idle_s=_IDLE_S
            ):
                pass
        except (BusError, DeadlineError, RemoteCallError) as error:
            log.info("rank %d: not in session %s yet: %s", rank, session, error)
            return rank, False
        return rank, True

    async def _ask_all(self, message: Message, expected: type[M]) -> M:
        """Have all ranks do something; return rank 0's answer.

        Raises:
            BusError: As `Bus.stream_request`; `DeadlineError` and `RemoteCallError`, too.

        """
        try:
            async with asyncio.TaskGroup() as group:
                asked = [
                    group.create_task(self._ask(rank, message, expected))
                    for rank in range(self._ranks.num_ranks)
                ]
        except ExceptionGroup as failures:
            raise _worst(failures.exceptions) from None
        return asked[0].result()

    async def _ask(self, rank: int, message: Message, expected: type[M]) -> M:
        answer: Message | None = None
        async for reply in self._request(rank_service(rank), message, idle_s=_IDLE_S):
            answer = reply
        if not isinstance(answer, expected):
            name = type(answer).__name__
            raise BusError(f"rank {rank}: expected {expected.__name__}, got {name}")
        return answer

    async def _attempts(self, attempt: Callable[[], Awaitable[R]]) -> R:
        """Try until it works, with new starts of the ranks in between.

        Raises:
            PublishConflictError: Other weights were published before, which no new start changes.
            ValueError: A rank says that the request is wrong in itself.
            RemoteCallError: A rank failed, attempt after attempt; `BusError` and `DeadlineError`,
                too.

        """
        for num_left in reversed(range(self._ranks.restarts_max + 1)):
            try:
                return await attempt()
            except (BusError, DeadlineError, RemoteCallError) as error:
                self._session = ""
                if isinstance(error, RemoteCallError) and error.kind == RemoteErrorKind.INVALID:
                    raise CorruptDataError(error.text) from error
                if not num_left or isinstance(error, PublishConflictError):
                    raise
                log.warning("ranks start again: %s", error)
                await asyncio.sleep(_PAUSE_S)
        raise AssertionError("unreachable")


def _worst(failures: Sequence[BaseException]) -> BaseException:
    """Return the failure that says most: what a rank answered, rather than that one is silent."""
    answered = [one for one in failures if isinstance(one, RemoteCallError)]
    invalid = [one for one in answered if one.kind == RemoteErrorKind.INVALID]
    return [*invalid, *answered, *failures][0]
