"""One rank as an actor: does with the others what the trainer requests.

```
 JoinRank ─▶ LoadRank ─▶ TakeStep, MeasureSamples, SaveRank, UploadWeights ─▶ ...
                │ one at a time, each on all ranks, in a worker thread
                ▼
 any error: answered, then the process ends, and with it every rank: all start again together
```
A rank has no way to repair a process group that one of its members left, so that it never tries:
the launcher starts all ranks again, and the trainer has them load the newest checkpoint.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.probe import probe_policy
from penstock.actors.policy.snapshot import ShardUploader
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.actors.runtime.vault import Vault
from penstock.actors.trainer.batching.manifests import trained_samples
from penstock.actors.trainer.checkpoint import (
    Ranks,
    load_checkpoint,
    load_reference,
    save_checkpoint,
)
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.engines.learners import open_ranked_learner, uses_transformers
from penstock.actors.trainer.engines.local import LocalEngine
from penstock.actors.trainer.off_policy import measure
from penstock.actors.trainer.preferences.reading import ExampleReader
from penstock.actors.trainer.ranks.learner import RankedLearner
from penstock.actors.trainer.ranks.models import release
from penstock.actors.trainer.ranks.plan import read_samples
from penstock.actors.trainer.ranks.world import RankEnvironment, World
from penstock.actors.trainer.step import train_step
from penstock.actors.trainer.turns import TurnStore
from penstock.messages.base import Event, Message
from penstock.messages.bus import Serve
from penstock.messages.errors import CodecError, DeadlineError, NotFoundError, StartAgainError
from penstock.messages.feedback import LiveSampleJoined, UserErased
from penstock.messages.requests.ranks import (
    JoinRank,
    LoadRank,
    MakeVersion0,
    MeasureSamples,
    RankLoaded,
    RankSaved,
    SampleFigures,
    SamplesMeasured,
    SaveRank,
    StepTaken,
    TakeStep,
    rank_service,
)
from penstock.messages.rollout import RolloutFinished, Turn
from penstock.messages.rpc import Ack, RemoteError, RemoteErrorKind, to_remote
from penstock.messages.training import BatchManifest, SampleEntry
from penstock.messages.weights import UploadWeights

log = logging.getLogger(__name__)

_BEAT_S = 1.0
_ANSWER_S = 1.0
"""Time in which an error's answer leaves the process before it ends."""
SessionRequest = JoinRank | MakeVersion0 | LoadRank | TakeStep | MeasureSamples | SaveRank


class TrainingRank(Actor):
    """Holds a part of the weights; answers with an `Ack` every second until its work is done.

    A request that is repeated while the connection changes joins the work that it began.
    """

    role: ClassVar[str] = "rank"
    follows: ClassVar[tuple[type[Event], ...]] = (UserErased,)

    def __init__(
        self,
        config: TrainerConfig,
        policy_config: PolicyConfig,
        environment: RankEnvironment,
        uploader: ShardUploader,
        opener: Vault,
    ) -> None:
        self._config = config
        self._policy_config = policy_config
        self._environment = environment
        self._uploader = uploader
        self._turns = TurnStore(config.turns_bytes_max, opener)
        self._opener = opener
        self._session = ""
        self._step = -1
        """Version that it holds; -1: none yet."""
        self._request: Message | None = None
        self._work: asyncio.Future[Message]
        self._error: asyncio.Future[Exception]
        self._learner: RankedLearner
        self._world: World
        self._ctx: Context

    @property
    def name(self) -> str:
        """Unique in the run."""
        return f"rank-{self._environment.rank}"

    async def start(self, ctx: Context) -> Effects:
        """Meet the other ranks."""
        self._ctx = ctx
        self._error = asyncio.get_running_loop().create_future()
        bound_s = self._config.ranks.step_s_max
        self._world = await ctx.offload(World, self._environment, self._config.device, bound_s)
        ctx.spawn("errors", self._end_with_error())
        return ()

    async def on_user_erased(self, event: UserErased, ctx: Context) -> Effects:
        """Forget the key that opens their turns."""
        self._turns.erase(event.tenant, event.user)
        return ()

    async def stop(self, ctx: Context) -> Effects:
        """Stop as it is: what it holds is in the newest checkpoint and the log."""
        return ()

    def services(self) -> Mapping[str, Serve]:
        """Return the service of this rank."""
        return {rank_service(self._environment.rank): self._answer}

    async def _answer(self, message: Message) -> AsyncIterator[Message]:
        if refusal := self._refusal(message):
            yield refusal
            return
        work = self._begin(message)
        while not work.done():
            yield Ack()
            await asyncio.wait([work], timeout=_BEAT_S)
        yield work.result()

    def _refusal(self, message: Message) -> RemoteError | None:
        """Return why a request is not for this start of the rank, if it is not."""
        if isinstance(message, UploadWeights):
            if message.policy_version != self._step:
                return _gone(f"it holds version {self._step}")
        elif isinstance(message, SessionRequest):
            if isinstance(message, JoinRank | LoadRank) and not self._session:
                self._session = message.session
            if message.session != self._session:
                if self._session and isinstance(message, JoinRank):
                    self._fail(StartAgainError(f"session {message.session} begins"))
                return _gone(f"it belongs to session {self._session or 'none'}")
        else:
            text = f"expected a request to a rank, got {type(message).__name__}"
            return RemoteError(kind=RemoteErrorKind.INVALID, error=text)
        return None

    def _begin(self, message: Message) -> asyncio.Future[Message]:
        """Return the work of a request, begun now if it is new."""
        if self._request == message:
            return self._work
        if self._request is not None and not self._work.done():
            self._fail(StartAgainError(f"{type(message).__name__} came during other work"))
        self._request = message
        self._work = asyncio.get_running_loop().create_future()
        self._ctx.spawn(type(message).__name__, self._run(self._handler(message), self._work))
        return self._work

    async def _run(
        self, handler: Coroutine[Any, Any, Message], work: asyncio.Future[Message]
    ) -> None:
        bound_s = self._config.ranks.step_s_max
        # Version 0 has no bound: mid-training is one long work, with saves of its own.
        bound = asyncio.timeout(None if isinstance(self._request, MakeVersion0) else bound_s)
        try:
            async with bound:
                work.set_result(await handler)
        except Exception as error:
            late = DeadlineError(f"still running after trainer.ranks.step_s_max {bound_s:g} s")
            cause = late if bound.expired() else error
            work.set_result(to_remote(cause))
            self._fail(cause)

    def _fail(self, error: Exception) -> None:
        if not self._error.done():
            self._error.set_result(error)

    async def _end_with_error(self) -> None:
        error = await self._error
        await asyncio.sleep(_ANSWER_S)
        raise error

    def _handler(self, message: Message) -> Coroutine[Any, Any, Message]:
        handlers: dict[type[Message], Callable[[Any], Coroutine[Any, Any, Message]]] = {
            JoinRank: self._join,
            MakeVersion0: self._make_version_0,
            LoadRank: self._load,
            TakeStep: self._take,
            MeasureSamples: self._measure,
            SaveRank: self._save,
            UploadWeights: self._upload,
        }
        return handlers[type(message)](message)

    async def _join(self, _message: JoinRank) -> Message:
        return Ack()

    async def _make_version_0(self, message: MakeVersion0) -> Message:
        """Make version 0: a model of transformers with all ranks, the own policy here alone."""
        world = self._world if uses_transformers(self._config) else None
        engine = LocalEngine(self._policy_config, self._config, world=world)
        position = await engine.make_version_0(self._ctx, message.seed)
        return RankSaved(object_key=position.saved.object_key)

    async def _load(self, message: LoadRank) -> Message:
        self._learner = await open_ranked_learner(
            self._ctx, self._policy_config, self._config, self._world
        )
        head = await load_checkpoint(self._ctx, message.object_key, self._learner)
        await load_reference(self._ctx, self._learner)
        self._step = head.step
        return RankLoaded(
            step=head.step,
            object_key=message.object_key,
            weights_digest=head.weights_digest,
            shapes=self._learner.published_shapes(),
            float32=self._learner.published_float32(),
            probe=await self._ctx.offload(_probe, self._learner),
        )

    async def _take(self, message: TakeStep) -> Message:
        """Take the step after the version that it holds, from the log's manifest."""
        assert message.step == self._step + 1, f"step {message.step} after version {self._step}"
        manifest = await self._ctx.last(BatchManifest, str(message.step))
        if manifest is None:
            raise NotFoundError(f"step {message.step}: its manifest is not on the log")
        config = self._config.of_step(manifest.settings)
        kept = self._learner.versions.recent
        turns = await self._read_turns(trained_samples(manifest), kept, config)
        reader = ExampleReader(self._ctx.store, self._opener, self._ctx.last, self._policy_config)
        examples = await reader.read(manifest)
        result = await self._ctx.offload(
            train_step, self._learner, manifest, turns, config, examples
        )
        self._turns.drop(manifest)
        self._step = message.step
        return StepTaken(
            weights_digest=result.weights_digest,
            optimizer_digest=result.optimizer_digest,
            metrics=result.metrics,
            staleness_tokens=result.staleness_tokens,
            skipped=result.skipped,
            drift=result.drift,
            probe=await self._ctx.offload(_probe, self._learner),
        )

    async def _read_turns(
        self, samples: list[SampleEntry], versions: Iterable[int], config: TrainerConfig
    ) -> dict[str, Sequence[Turn]]:
        """Read the turns that this rank computes something of, as the log's ends name them."""
        world = self._world
        own = read_samples(
            samples, versions, config.micro_batch_tokens, world.rank, world.num_ranks
        )
        for sample in own:
            name = sample.rollout_id
            event = (
                await self._ctx.last(LiveSampleJoined, f"{name}.{sample.revision}")
                if sample.num_turns
                else await self._ctx.last(RolloutFinished, name)
            )
            if event is None:
                raise CodecError(f"{name}: the log has no end of it")
            self._turns.add(name, event)
        return await self._turns.load(own, self._ctx.store, self._ctx.last)

    async def _measure(self, message: MeasureSamples) -> Message:
        turns = await self._read_turns(message.samples, (), self._config)
        found = await self._ctx.offload(
            measure, self._learner, message.samples, turns, self._config
        )
        figures = {n: SampleFigures(ess=each.ess, ratio=each.ratio) for n, each in found.items()}
        return SamplesMeasured(figures=figures)

    async def _save(self, message: SaveRank) -> Message:
        ranks = Ranks(rank=self._world.rank, gather=self._world.gather)
        saved = await save_checkpoint(
            self._ctx, self._learner, message.completed, message.ledger, ranks
        )
        return RankSaved(object_key=saved.object_key)

    async def _upload(self, message: UploadWeights) -> Message:
        runs = await self._ctx.offload(self._learner.held_runs)
        await self._uploader.upload(message, runs)
        return Ack()


def _probe(learner: RankedLearner) -> list[float]:
    with learner.published_weights():
        found = probe_policy(learner.policy)
    release(learner.policy)
    return found


def _gone(text: str) -> RemoteError:
    return RemoteError(kind=RemoteErrorKind.GONE, error=text)
