"""Computes calls in the order of the log, for the server and for replays alike."""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, NamedTuple, cast

import msgspec

from penstock.actors.generator.engine import InvalidRequestError
from penstock.actors.policy.config import AdapterConfig
from penstock.actors.policy.model import Policy
from penstock.actors.policy.tokenizer import Tokenizer
from penstock.actors.trainer.learner import NonFiniteError
from penstock.infra.tinker.book import (
    NoSuchError,
    lora_of,
    sampler_id,
    saved_path,
    targets_of,
)
from penstock.infra.tinker.model import TrainedModel, with_adapters
from penstock.infra.tinker.requests import (
    LoadBody,
    LoraBody,
    ModelBody,
    SampleBody,
    SaveSamplerBody,
    SaveStateBody,
    StepBody,
)
from penstock.infra.tinker.sampler import WeightsSampler, adapted
from penstock.infra.tinker.settings import TinkerConfig
from penstock.infra.tinker.wire import prompt_logprobs_reply, read_forward_backward
from penstock.messages.errors import PenstockError
from penstock.messages.reading.parsing import parse_json
from penstock.messages.requests.tinker import TinkerCalled, TinkerKind

log = logging.getLogger(__name__)
_SAMPLER_S_MAX = 600.0
"""Longest wait, in seconds, until some sampler can be evicted for another."""
CHANGING = frozenset(
    {TinkerKind.MODEL, TinkerKind.LOAD, TinkerKind.FORWARD_BACKWARD, TinkerKind.OPTIM_STEP}
)
"""Calls that may change a model."""


class Base(NamedTuple):
    """The model that all adapters share."""

    policy: Policy
    tokenizer: Tokenizer
    end_ids: tuple[int, ...]
    context: int
    """Longest sequence in tokens."""


class SavedState(NamedTuple):
    """Weights that a call saved."""

    path: str
    rank: int
    targets: tuple[str, ...]
    ttl_s: int | None
    state: bytes


class CallOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a call gives."""

    body: bytes = b""
    weights_digest: str = ""
    optimizer_digest: str = ""
    saved: SavedState | None = None
    error: str = ""
    is_refused: bool = False


Offload = Callable[..., Awaitable[Any]]
"""Runs a function with its arguments in a thread."""
ReadSaved = Callable[[str], Awaitable[SavedState]]
"""Returns the weights of a path.

Raises:
    NoSuchError: There are none.

"""


class Executor:
    """Models and samplers in memory; one call of a model at a time, samples beside them."""

    def __init__(
        self, base: Base, config: TinkerConfig, offload: Offload, read_saved: ReadSaved
    ) -> None:
        """Begin with nothing in memory."""
        self.base = base
        self.models: OrderedDict[str, TrainedModel] = OrderedDict()
        """Least recently used first."""
        self._config = config
        self._offload = offload
        self._read_saved = read_saved
        self._samplers: OrderedDict[str, WeightsSampler] = OrderedDict()
        """By path; least recently used first."""
        self._changed = asyncio.Condition()

    async def close(self) -> None:
        """Stop the engines of all samplers."""
        for sampler in self._samplers.values():
            await sampler.stop()
        self._samplers.clear()

    async def run(self, call: TinkerCalled, body: bytes, path: str = "") -> CallOutcome:
        """Compute a call. An error becomes its outcome, and the model discards partial work.

        Args:
            call: The call; its model must be in memory, unless the call makes one.
            body: Body as the client sent it.
            path: Weights of the sampler, if the call samples.

        """
        try:
            if call.kind is TinkerKind.SAMPLE:
                return await self._sample(call, body, path)
            return await self._of_model(call, body)
        except Exception as error:
            if call.kind in CHANGING:
                self.models.pop(call.target, None)
            if isinstance(error, ExceptionGroup):
                error = cast("ExceptionGroup[Exception]", error).exceptions[0]
            refused = isinstance(error, InvalidRequestError | NonFiniteError | NoSuchError)
            if not isinstance(error, PenstockError):
                log.exception("call %s failed", call.request_id)
            return CallOutcome(error=f"{type(error).__name__}: {error}", is_refused=refused)

    async def _of_model(self, call: TinkerCalled, body: bytes) -> CallOutcome:
        name = call.target
        if call.kind is TinkerKind.MODEL:
            lora = parse_json(body, ModelBody, "body").lora_config
            await self.make(name, lora, call.seed)
            return await self._changed_model(name, {"type": "create_model", "model_id": name})
        if call.kind is TinkerKind.LOAD:
            return await self._load(name, parse_json(body, LoadBody, "body"))
        if name not in self.models:
            raise NoSuchError(f"model_id: {name!r} could not be made")
        model = self.models[name]
        self.models.move_to_end(name)
        if call.kind is TinkerKind.FORWARD_BACKWARD:
            request = read_forward_backward(body)
            return CallOutcome(body=await self._offload(model.forward_backward, request))
        if call.kind is TinkerKind.OPTIM_STEP:
            params = parse_json(body, StepBody, "body").adam_params
            metrics = await self._offload(model.optim_step, params)
            return await self._changed_model(name, {"metrics": metrics})
        return await self._save(call, body, model)

    async def make(self, name: str, lora: LoraBody, seed: int = 0) -> TrainedModel:
        """Put a new model into memory."""
        targets = targets_of(lora, is_dense=self.base.policy.config.is_dense)
        adapter = AdapterConfig(rank=lora.rank, targets=targets)
        model = await self._offload(TrainedModel, self.base.policy, adapter, self._config, seed)
        self.models[name] = model
        return model

    async def _load(self, name: str, body: LoadBody) -> CallOutcome:
        saved = await self._read_saved(body.path)
        model = self.models.get(name)
        if model is None:
            model = await self.make(name, lora_of(saved.rank, saved.targets))
        if (model.adapter.rank, model.adapter.targets) != (saved.rank, saved.targets):
            raise InvalidRequestError(
                f"path: expected weights of rank {model.adapter.rank} and the same matrices, "
                f"got {body.path} of rank {saved.rank}"
            )
        await self._offload(lambda: model.load(saved.state, with_optimizer=body.optimizer))
        reply = {"type": "load_weights", "path": body.path, "model_id": name}
        return await self._changed_model(name, reply)

    async def _changed_model(self, name: str, reply: dict[str, Any]) -> CallOutcome:
        weights, optimizer = await self._offload(self.models[name].digests)
        return CallOutcome(
            body=msgspec.json.encode(reply), weights_digest=weights, optimizer_digest=optimizer
        )

    async def _save(self, call: TinkerCalled, body: bytes, model: TrainedModel) -> CallOutcome:
        is_state = call.kind is TinkerKind.SAVE
        kind = SaveStateBody if is_state else SaveSamplerBody
        asked = parse_json(body, kind, "body")
        path = saved_path(call, asked.path)
        state = await self._offload(model.state if is_state else model.published)
        reply: dict[str, Any] = {"type": "save_weights", "path": path}
        if isinstance(asked, SaveSamplerBody):
            reply["type"] = "save_weights_for_sampler"
            if asked.path is None and asked.sampling_session_seq_id is not None:
                sampler = sampler_id(call.session_id, asked.sampling_session_seq_id)
                reply = {"type": reply["type"], "sampling_session_id": sampler}
        adapter = model.adapter
        saved = SavedState(path, adapter.rank, adapter.targets, asked.ttl_seconds, state)
        return CallOutcome(body=msgspec.json.encode(reply), saved=saved)

    async def _sample(self, call: TinkerCalled, body: bytes, path: str) -> CallOutcome:
        asked = parse_json(body, SampleBody, "body")
        async with self._sampler(path) as sampler:
            found = await sampler.sample(call.request_id, asked, call.seed)
            if asked.prompt_logprobs:
                logprobs = await self._offload(sampler.prompt_logprobs, asked.tokens)
                found += prompt_logprobs_reply(logprobs)
        return CallOutcome(body=found)

    @contextlib.asynccontextmanager
    async def _sampler(self, path: str) -> AsyncGenerator[WeightsSampler]:
        async with self._changed:
            if path not in self._samplers:
                async with asyncio.timeout(_SAMPLER_S_MAX):
                    await self._changed.wait_for(self._has_room)
                # Under the lock: a second request must not load the same weights again.
                self._samplers[path] = await self._started(path)
            sampler = self._samplers[path]
            self._samplers.move_to_end(path)
            sampler.num_users += 1
        try:
            yield sampler
        finally:
            async with self._changed:
                sampler.num_users -= 1
                self._changed.notify_all()

    def _has_room(self) -> bool:
        idle = any(each.num_users == 0 for each in self._samplers.values())
        return idle or len(self._samplers) < self._config.num_samplers_max

    async def _started(self, path: str) -> WeightsSampler:
        if len(self._samplers) >= self._config.num_samplers_max:
            oldest = next(p for p, each in self._samplers.items() if each.num_users == 0)
            await self._samplers.pop(oldest).stop()
        policy = self.base.policy
        if path:
            saved = await self._read_saved(path)
            adapter = AdapterConfig(rank=saved.rank, targets=saved.targets)
            policy = await self._offload(
                lambda: adapted(with_adapters(self.base.policy, adapter), saved.state)
            )
        sampler = WeightsSampler(policy, self.base.tokenizer, self.base.end_ids)
        await sampler.start(self.base.context, self._config.num_sampling_max)
        log.info("sampler of %s started", path or "the base")
        return sampler
