"""The embedded engine: continuous batching on a worker thread, with double-buffered weights.

Weight updates while requests are in flight use two policies; one samples, the other is written:

    begin: standby <- copy of live    apply: write standby    commit: verify, then swap the two

Only the swap delays a step; it exchanges two references and computes the probe.

The worker thread runs the steps of the core, and commands between them:

    event loop ──commands──▶ inbox ──▶ worker: command, step, step, command, step ...
        ▲                                  │
        └────── call_soon_threadsafe ◀─────┘ chunks

While the worker runs, only it touches the core, so the batch needs no lock.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

import msgspec
import numpy as np
import torch

from penstock.actors.generator.base_engine import BaseEngine, check_patch, open_grammar
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
from penstock.actors.generator.options import EngineOptions
from penstock.actors.generator.requests import GenerationRequest
from penstock.actors.generator.sampler import GrammarMasks
from penstock.actors.policy.checkpoint import PUBLISHED_DTYPE, hf_views, state_digest
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.device import fix_threads
from penstock.actors.policy.model import Policy
from penstock.actors.policy.probe import check_probe
from penstock.kernels.decode.layout import DecodeWeights
from penstock.kernels.delta import Patch
from penstock.messages.errors import CorruptDataError, DeadlineError
from penstock.messages.task import Sampling

log = logging.getLogger(__name__)


class StagedWeights:
    """Double buffer of the weights. Not thread-safe: its owner calls one method at a time."""

    def __init__(self, config: PolicyConfig) -> None:
        self._live = _empty_policy(config)
        self._standby = _empty_policy(config)
        self._views: dict[str, torch.Tensor] | None = None
        """Views of the standby's tensors while an update is open, else None."""

    def begin(self) -> None:
        """Open an update that starts from the live weights."""
        # Deltas are relative to the live weights.
        live, standby = hf_views(self._live), hf_views(self._standby)
        for name, view in standby.items():
            view.copy_(live[name])
        self._views = standby

    def apply(self, patches: Mapping[str, np.ndarray | Patch]) -> None:
        """Write tensors or patches into the standby."""
        views = self._open_views()
        for name, patch in patches.items():
            view = views.get(name)
            check_patch(name, patch, None if view is None else view.shape)
            assert view is not None, "check_patch refuses unknown names"
            if isinstance(patch, np.ndarray):
                view.copy_(_from_bits(patch))
            else:
                view.view(-1)[torch.from_numpy(patch.flat_indices)] = _from_bits(patch.values)

    def verify(self, root_digest: str) -> None:
        """Check the standby against the digest that its publisher announced."""
        found = _published_digest(self._open_views())
        if found != root_digest:
            raise CorruptDataError(
                f"staged weights: expected root digest {root_digest}, got {found}"
            )

    @property
    def standby(self) -> Policy:
        """The policy that is being written."""
        self._open_views()
        return self._standby

    def swap(self) -> None:
        """Close the update: the standby becomes the live policy."""
        self._open_views()
        self._live, self._standby, self._views = self._standby, self._live, None

    def digest(self) -> str:
        """Return the root digest of the live weights."""
        return _published_digest(hf_views(self._live))

    def _open_views(self) -> dict[str, torch.Tensor]:
        if self._views is None:
            raise InvalidRequestError("no weight update is open; call begin_update first")
        return self._views


def _empty_policy(config: PolicyConfig) -> Policy:
    policy = Policy(config)
    for parameter in policy.parameters():
        parameter.detach().zero_()
    return policy.requires_grad_(False).eval()


def _published_digest(views: Mapping[str, torch.Tensor]) -> str:
    return state_digest({name: view.to(PUBLISHED_DTYPE) for name, view in views.items()})


def _from_bits(values: np.ndarray) -> torch.Tensor:
    """Widen bfloat16 bit patterns to float32, exactly."""
    # A bfloat16 is the upper half of a float32.
    return torch.from_numpy((values.astype(np.uint32) << 16).view(np.float32))


_COMMAND_S = 30.0
"""Longest wait for a command in seconds. It waits for at most one step, so after this long the
worker is stuck."""

T = TypeVar("T")


class EngineWorker:
    """Thread that runs the steps of a core until it is stopped."""

    def __init__(self, core: EngineCore, deliver: Callable[[list[Output]], None]) -> None:
        """Prepare the thread.

        Args:
            core: Core whose steps to run.
            deliver: Callback on the event loop that receives the chunks of a step.

        """
        self.core = core
        self.is_paused = False
        self.error = ""
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_alive(self) -> bool:
        """Whether steps can run."""
        return self._thread.is_alive() and not self._is_stopping

    def start(self) -> None:
        """Start the thread; call this on the event loop that receives the chunks."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after the step in progress.

        Raises:
            DeadlineError: The step did not end in time.

        """
        if self._is_stopping or self._loop is None:
            return
        self._is_stopping = True
        # An empty command wakes a worker that waits for its inbox.
        self.post(lambda: None)
        try:
            async with asyncio.timeout(_COMMAND_S):
                await asyncio.to_thread(self._thread.join)
        except TimeoutError as error:
            text = f"engine worker: still running {_COMMAND_S:g} s after a stop"
            raise DeadlineError(text) from error

    def post(self, command: Callable[[], None]) -> None:
        """Queue a command to run between two steps, without waiting for it."""
        self._inbox.put(command)

    async def call(self, command: Callable[[], T]) -> T:
        """Run a command between two steps and return its result.

        Raises:
            EngineNotReadyError: The worker has ended.
            DeadlineError: The worker did not reach the command in time.

        """
        if not self.is_alive:
            raise EngineNotReadyError(f"the engine is not running {self.error}".rstrip())
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)

        self.post(run)
        try:
            async with asyncio.timeout(_COMMAND_S):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise DeadlineError(f"engine worker: no step ended within {_COMMAND_S:g} s") from error

    def emit(self, outputs: list[Output]) -> None:
        """Pass chunks to the event loop."""
        # The loop may be closed while the thread still ends its last step.
        if outputs and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _run(self) -> None:
        fix_threads(self.core.options.num_threads)
        try:
            while not self._is_stopping and not self.core.fault:
                self._run_commands()
                if self._has_work():
                    self.emit(self.core.step())
        except Exception as error:
            log.exception("engine worker failed")
            self.core.fault = repr(error)
        if self.core.fault:
            log.error("engine is broken, aborting all requests: %s", self.core.fault)
            # Before the chunks: `generate` reads it to tell a dead engine from an aborted request.
            self.error = self.core.fault
            self.emit(self.core.abort(None))

    def _has_work(self) -> bool:
        core = self.core
        has_requests = core.num_running > 0 or bool(core.waiting)
        return has_requests and not self.is_paused and core.model is not None

    def _run_commands(self) -> None:
        """Run the commands in the inbox; block for the next one if there is no step to run."""
        if not self._has_work():
            self._inbox.get()()
        # A snapshot of the size: commands that arrive meanwhile must not starve the next step.
        for _ in range(self._inbox.qsize()):
            self._inbox.get()()


_REQUEST_S = 600.0
"""Longest wait for the next chunk of a request in seconds, including pauses."""


class TorchEngine(BaseEngine[StagedWeights]):
    """The embedded `Engine`: construct it, `start()` it on the event loop, then give it weights.

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
        """Create an engine; it needs `grammars` to accept requests that have a grammar.

        Raises:
            InvalidRequestError: `num_tokens_max` exceeds the longest context of the policy.

        """
        options = options or EngineOptions()
        if options.num_tokens_max > config.max_position_embeddings:
            raise InvalidRequestError(
                "num_tokens_max: expected at most the policy's max_position_embeddings, "
                f"{config.max_position_embeddings}, got {options.num_tokens_max}"
            )
        self._grammars = grammars
        self._core = EngineCore(config, options)
        self._worker = EngineWorker(self._core, self._deliver)
        super().__init__(config, options, StagedWeights(config))
        self._streams: dict[str, asyncio.Queue[TokenChunk]] = {}

    def start(self) -> None:
        """Start stepping; call once."""
        self._worker.start()

    async def stop(self) -> None:
        """Abort everything and end the worker."""
        if self._worker.is_alive:
            await self.abort()
        await self._worker.stop()

    async def generate(  # noqa: PLR0913 - parameters of a request
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
        self._check(request_id, token_ids, sampling, routes_from, num_resumed)
        if sampling.num_tokens_max > self._options.num_tokens_max:
            bound = self._options.num_tokens_max
            sampling = msgspec.structs.replace(sampling, num_tokens_max=bound)
        # Room for one chunk per token and a last one, since `_deliver` must never block.
        stream: asyncio.Queue[TokenChunk] = asyncio.Queue(sampling.num_tokens_max + 2)
        # Before the first await, so that a second request with this id is refused.
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
                    raise EngineNotReadyError("the weights in use failed their probe")
                if chunk.is_refused:
                    raise InvalidRequestError(chunk.error)
                if chunk.error:
                    raise RequestFailedError(f"request {request_id}: {chunk.error}")
                yield chunk
        finally:
            del self._streams[request_id]
            # The client left early: free the row.
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
            # Packing takes long, so it runs in a thread while the old weights keep sampling.
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
        step = self._core.decoder.name
        return self._capabilities(f"torch ({step} step)", step)

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
        # Chunks of the old version leave before any token of the new one.
        self._worker.emit(self._core.swap_model(model, policy_version))
        self._probe = self._core.probe()
        try:
            tolerance = self._options.probe_tolerance
            check_probe(self._probe, probe, tolerance, policy_version, self._expected)
        except CorruptDataError:
            self._worker.emit(self._core.drop_weights())
            raise
        self._expected = probe
        pause_ms = (time.perf_counter() - started) * 1e3
        self._core.metrics.last_pause_ms = pause_ms
        log.info("version %d in use, steps paused for %.1f ms", policy_version, pause_ms)
        return pause_ms


async def _next_chunk(stream: asyncio.Queue[TokenChunk], request_id: str) -> TokenChunk:
    try:
        async with asyncio.timeout(_REQUEST_S):
            return await stream.get()
    except TimeoutError as error:
        raise DeadlineError(f"request {request_id}: no chunk within {_REQUEST_S:g} s") from error
