"""The embedded engine: the policy in torch, continuous batching, staged weight swaps."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import msgspec
import numpy as np

from penstock.actors.generator.checks import check_ready, check_request, open_grammar
from penstock.actors.generator.core import EngineCore, Output
from penstock.actors.generator.engine import (
    EngineCapabilities,
    EngineDiedError,
    EngineHealth,
    EngineMetrics,
    EngineNotReadyError,
    InvalidRequestError,
    RequestFailedError,
    TokenChunk,
)
from penstock.actors.generator.masks import GrammarMasks
from penstock.actors.generator.options import EngineOptions
from penstock.actors.generator.request import GenerationRequest
from penstock.actors.generator.staging import StagedWeights
from penstock.actors.generator.updates import StagedUpdates
from penstock.actors.generator.worker import EngineWorker
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.actors.policy.probe import check_probe
from penstock.kernels.decode.layout import DecodeWeights
from penstock.messages.errors import CorruptDataError, DeadlineError
from penstock.messages.task import Sampling

_REQUEST_S = 600.0
"""Longest wait for a request's next chunk, pauses included."""


class TorchEngine(StagedUpdates[StagedWeights]):
    """An `Engine`; construct it, `start()` it on the event loop, then give it weights.

    Example:
        >>> engine = TorchEngine(config, EngineOptions(num_threads=1))
        >>> engine.start()
        >>> await engine.begin_update()
        >>> await engine.apply({name: as_numpy(t) for name, t in publishable_state(p).items()})
        >>> await engine.commit(0)

    """

    def __init__(
        self,
        config: PolicyConfig,
        options: EngineOptions | None = None,
        grammars: GrammarMasks | None = None,
    ) -> None:
        """Make an engine; without `grammars` it refuses requests that have one.

        Raises:
            InvalidRequestError: Contexts longer than the policy's.
            ConfigError: The device cannot compute this policy.
            DeviceUnavailableError: The device is not there.

        """
        self._options = options or EngineOptions()
        if self._options.num_tokens_max > config.max_position_embeddings:
            raise InvalidRequestError(
                f"num_tokens_max {self._options.num_tokens_max} exceeds the policy's "
                f"max_position_embeddings {config.max_position_embeddings}"
            )
        self._config = config
        self._grammars = grammars
        self._core = EngineCore(config, self._options)
        self._worker = EngineWorker(self._core, self._deliver)
        super().__init__(StagedWeights(config, self._core.device))
        self._streams: dict[str, asyncio.Queue[TokenChunk]] = {}

    def start(self) -> None:
        """Start stepping; call once."""
        self._worker.start()

    async def stop(self) -> None:
        """Abort everything and end the worker."""
        if self._worker.is_alive:
            await self.abort()
        await self._worker.stop()

    async def generate(  # noqa: PLR0913 - what a request is
        self,
        token_ids: np.ndarray,
        sampling: Sampling,
        *,
        request_id: str,
        session_id: str = "",
        routes_from: int = 0,
        num_resumed: int = 0,
    ) -> AsyncIterator[TokenChunk]:
        """See `Engine.generate`; errors come with the first iteration."""
        num_max = self._options.num_running_max + self._options.num_waiting_max
        check_ready(self.health(), request_id, self._streams, num_max)
        check_request(
            *(token_ids, sampling, routes_from, num_resumed),
            vocab_size=self._config.vocab_size,
            num_tokens_max=self._options.num_tokens_max,
        )
        if sampling.num_tokens_max > self._options.num_tokens_max:
            bound = self._options.num_tokens_max
            sampling = msgspec.structs.replace(sampling, num_tokens_max=bound)
        stream: asyncio.Queue[TokenChunk] = asyncio.Queue(sampling.num_tokens_max + 2)
        self._streams[request_id] = stream
        ended = False
        try:
            request = GenerationRequest(
                *(token_ids, sampling, request_id, session_id, routes_from),
                num_resumed=num_resumed,
                grammar=await open_grammar(sampling, self._grammars),
            )
            request.begin(self._config.vocab_size)
            self._worker.post(lambda: self._core.add(request))
            while not ended:
                chunk = await _next_chunk(stream, request_id)
                ended = chunk.stop_reason is not None
                if ended and self._worker.error:
                    raise EngineDiedError(f"the engine died: {self._worker.error}")
                if ended and self._core.model is None:
                    raise EngineNotReadyError("the weights in use were found to be wrong")
                if chunk.is_refused:
                    raise InvalidRequestError(chunk.error)
                if chunk.error:
                    raise RequestFailedError(f"request {request_id}: {chunk.error}")
                yield chunk
        finally:
            del self._streams[request_id]
            if not ended:
                self._worker.post(lambda: self._abort(request_id))

    async def abort(self, request_id: str | None = None) -> None:
        """See `Engine.abort`."""
        await self._worker.call(lambda: self._abort(request_id))

    async def pause(self) -> None:
        """See `Engine.pause`."""
        await self._worker.call(lambda: self._set_paused(True))

    async def resume(self) -> None:
        """See `Engine.resume`."""
        await self._worker.call(lambda: self._set_paused(False))

    async def commit(
        self, policy_version: int, root_digest: str | None = None, probe: Sequence[float] = ()
    ) -> float:
        """See `Engine.commit`."""
        async with self._weights_lock:
            if root_digest is not None:
                await asyncio.to_thread(self._weights.verify, root_digest)
            prepare, standby = self._core.decoder.prepare, self._weights.standby
            model = await asyncio.to_thread(prepare, standby)
            return await self._worker.call(lambda: self._swap(model, policy_version, probe))

    async def reset_prefix_cache(self) -> None:
        """See `Engine.reset_prefix_cache`."""
        await self._worker.call(self._core.cache.forget_parked)

    def health(self) -> EngineHealth:
        """See `Engine.health`."""
        core, worker = self._core, self._worker
        return EngineHealth(
            ready=core.model is not None and worker.is_alive,
            paused=worker.is_paused,
            policy_version=core.policy_version,
            num_running=core.num_running,
            num_waiting=len(self._streams) - core.num_running,
            error=worker.error,
        )

    def metrics(self) -> EngineMetrics:
        """See `Engine.metrics`."""
        return msgspec.structs.replace(self._core.metrics)

    def capabilities(self) -> EngineCapabilities:
        """See `Engine.capabilities`."""
        return EngineCapabilities(
            name=f"torch ({self._core.decoder.name} step)",
            num_tokens_max=self._options.num_tokens_max,
            num_running_max=self._options.num_running_max,
            num_waiting_max=self._options.num_waiting_max,
            arithmetic=f"{self._core.decoder.name}/{self._config.numerics.expert_format}",
            num_experts=self._config.num_experts,
        )

    def _deliver(self, outputs: list[Output]) -> None:
        for request, chunk in outputs:
            stream = self._streams.get(request.request_id)
            if stream is not None:
                stream.put_nowait(chunk)

    def _abort(self, request_id: str | None) -> None:
        self._worker.emit(self._core.abort(request_id))

    def _set_paused(self, is_paused: bool) -> None:
        self._worker.is_paused = is_paused

    def _swap(
        self, model: Policy | DecodeWeights, policy_version: int, probe: Sequence[float]
    ) -> float:
        started = time.perf_counter()
        self._weights.swap()
        self._worker.emit(self._core.swap_model(model, policy_version))
        self._probe = self._core.probe()
        try:
            check_probe(self._probe, probe, self._options.probe_tolerance, policy_version)
        except CorruptDataError:
            self._worker.emit(self._core.disown())
            raise
        pause_ms = (time.perf_counter() - started) * 1e3
        self._core.metrics.last_pause_ms = pause_ms
        return pause_ms


async def _next_chunk(stream: asyncio.Queue[TokenChunk], request_id: str) -> TokenChunk:
    try:
        async with asyncio.timeout(_REQUEST_S):
            return await stream.get()
    except TimeoutError as error:
        raise DeadlineError(f"request {request_id}: no chunk within {_REQUEST_S} s") from error
