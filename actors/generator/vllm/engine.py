"""The `Engine` that runs vLLM."""

import asyncio
import itertools
import logging
import tempfile
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path

import msgspec
import numpy as np

from penstock.actors.generator.base_engine import BaseEngine, open_grammar
from penstock.actors.generator.engine import (
    EngineCapabilities,
    EngineHealth,
    EngineMetrics,
    EngineNotReadyError,
    TokenChunk,
)
from penstock.actors.generator.sampler import GrammarMasks, TurnShaper
from penstock.actors.generator.vllm.client import VllmClient
from penstock.actors.generator.vllm.mirror import WeightMirror
from penstock.actors.generator.vllm.options import VllmOptions
from penstock.actors.generator.vllm.streaming import TurnStream
from penstock.actors.generator.vllm.turns import TurnSettings
from penstock.actors.policy.adapter import PREFIX as ADAPTER_PREFIX
from penstock.actors.policy.checkpoint import adapter_shapes, tensor_shapes, write_adapters
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.hf.config import config_json
from penstock.actors.policy.probe import check_probe, probe_prompts
from penstock.actors.policy.tokenizer import Tokenizer
from penstock.messages.rollout import StopReason
from penstock.messages.task import Sampling

log = logging.getLogger(__name__)

_SESSIONS_MAX = 65_536
"""Maximum number of sessions whose cache epoch is remembered."""


class VllmEngine(BaseEngine[WeightMirror]):
    """An `Engine` on vLLM: construct it, `await start()`, then give it weights."""

    def __init__(
        self,
        config: PolicyConfig,
        options: VllmOptions,
        tokenizer: Tokenizer,
        stop_ids: list[int],
        config_text: str = "",
    ) -> None:
        """Prepare the engine without importing vLLM.

        Args:
            config: Shape of the policy.
            options: Options with which vLLM is started.
            tokenizer: Tokenizer of the policy, needed for grammars.
            stop_ids: Tokens that end a turn, needed for grammars.
            config_text: config.json of the model; by default it is made from its shape, which
                suffices where the built-in policy computes it, too.

        """
        shapes = {} if config.is_foreign else tensor_shapes(config) | adapter_shapes(config)
        super().__init__(config, options, WeightMirror(shapes))
        self._cache_block = options.cache_block
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self._config_text = config_text or config_json(config)
        self._grammars = GrammarMasks(tokenizer, stop_ids, config.vocab_size)
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-vllm-")
        self._streams: dict[str, TurnStream] = {}
        self._sessions: OrderedDict[str, int] = OrderedDict()
        """Cache epoch of each session's last turn, by session id."""
        # Part of vLLM's cache salt: a new epoch makes all older cache entries unreachable.
        self._epoch = 0
        self._keys = itertools.count()
        self._metrics = EngineMetrics()
        self._busy_since = 0.0
        self._version, self._is_proven, self._is_paused = -1, False, False
        self._client = VllmClient(options, config.adapter)

    async def start(self) -> None:
        """Start vLLM's processes; takes about ten seconds.

        Raises:
            ConfigError: vLLM is not installed here or does not support the model.

        """
        config = self._config
        arguments = (
            config.vocab_size,
            (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok),
            self._tokenizer.to_json(),
            self._stop_ids,
        )
        folder = Path(self._folder.name) / "model"
        await self._client.start(self._config_text, folder, arguments)

    async def stop(self) -> None:
        """Abort everything and end vLLM's processes."""
        await self.abort()
        await self._client.stop()
        self._folder.cleanup()

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
        # The session's cached context is recomputed with other weights, and so are its routes.
        if self._sessions.get(session_id) != self._epoch:
            routes_from = 0
        room = min(sampling.num_tokens_max, self._options.num_tokens_max - len(token_ids))
        sampling = msgspec.structs.replace(sampling, num_tokens_max=room)
        # Request ids may repeat over time; keys of turns never do.
        key = f"{next(self._keys)}"
        stream = TurnStream(self._client, self._config, self._metrics, key)
        self._streams[request_id] = stream
        self._busy_since = self._busy_since or time.monotonic()
        reason = None
        try:
            await self._check_grammar(token_ids, sampling, num_resumed)
            self._note_session(session_id)
            settings = TurnSettings(key, sampling, num_resumed)
            prompt, salt = token_ids.tolist(), f"{self._epoch}"
            async with aclosing(stream.chunks(prompt, settings, salt, routes_from)) as chunks:
                async for chunk in chunks:
                    reason = chunk.stop_reason
                    # A chunk without tokens has no version of its own.
                    version = self._version if chunk.policy_version < 0 else chunk.policy_version
                    yield msgspec.structs.replace(chunk, policy_version=version)
        finally:
            del self._streams[request_id]
            self._metrics.num_aborted += reason in {None, StopReason.ABORTED}
            if not self._streams:
                self._metrics.busy_s += time.monotonic() - self._busy_since
                self._busy_since = 0.0

    async def _check_grammar(
        self, token_ids: np.ndarray, sampling: Sampling, num_resumed: int
    ) -> None:
        """Compile the grammar here, and check that it allows the tokens the turn already has."""
        # Here first: in the worker, a slow or invalid grammar would hold up everybody's step.
        grammar = await open_grammar(sampling, self._grammars)
        if grammar is not None and (shaper := TurnShaper.of(sampling, grammar)) is not None:
            prompt = np.ascontiguousarray(token_ids, dtype=np.int32)
            shaper.begin(prompt, self._config.vocab_size, num_resumed)

    def _note_session(self, session_id: str) -> None:
        if session_id:
            self._sessions[session_id] = self._epoch
            self._sessions.move_to_end(session_id)
        while len(self._sessions) > _SESSIONS_MAX:
            self._sessions.popitem(last=False)

    async def abort(self, request_id: str | None = None) -> None:
        """See `Engine.abort`."""
        for name, stream in self._streams.items():
            if request_id in (None, name):
                stream.end()
        # Lets the streams notice before the caller continues.
        await asyncio.sleep(0)

    async def pause(self) -> None:
        """See `Engine.pause`."""
        self._is_paused = True
        await self._client.pause()

    async def resume(self) -> None:
        """See `Engine.resume`."""
        self._is_paused = False
        await self._resume()

    async def _resume(self) -> None:
        """Let vLLM continue, unless a caller paused it or its weights failed their probe."""
        if self._is_proven and not self._is_paused:
            await self._client.resume()

    async def commit(
        self, policy_version: int, root_digest: str | None = None, probe: Sequence[float] = ()
    ) -> float:
        """See `Engine.commit`."""
        async with self._weights_lock:
            if root_digest is not None:
                await asyncio.to_thread(self._weights.verify, root_digest)
            path = self._weights.staged_file
            started = time.perf_counter()
            await self._client.pause()
            try:
                await self._exchange(path, policy_version)
                tolerance = self._options.probe_tolerance
                check_probe(self._probe, probe, tolerance, policy_version, self._expected)
                self._is_proven, self._expected = True, probe
            # Also on cancellation: from here on it is unknown which weights vLLM holds.
            except BaseException:
                log.exception("commit of version %d failed, engine not ready", policy_version)
                self._drop_weights()
                raise
            finally:
                await self._resume()
            self._metrics.last_pause_ms = (time.perf_counter() - started) * 1e3
            pause_ms = self._metrics.last_pause_ms
            log.info("version %d in use, steps paused for %.1f ms", policy_version, pause_ms)
            return pause_ms

    async def _exchange(self, path: str, policy_version: int) -> None:
        """Load the staged weights into vLLM and compute their probe."""
        changes = self._weights.changes
        await self._client.call("penstock_load", self._weights.rows, path, changes, policy_version)
        self._weights.swap()
        if (adapter := self._config.adapter) is not None:
            folder = Path(self._folder.name) / "adapter"
            tensors = self._weights.starting_with(ADAPTER_PREFIX)
            await asyncio.to_thread(write_adapters, folder, tensors, adapter)
            await self._client.load_adapter(folder)
        self._version, self._epoch = policy_version, self._epoch + 1
        prompts = probe_prompts(self._config.vocab_size).tolist()
        self._probe = await self._client.call("penstock_probe", prompts)

    def _drop_weights(self) -> None:
        """Become not ready and end all requests in flight: the weights in use are wrong."""
        self._is_proven = False
        for stream in self._streams.values():
            stream.end(EngineNotReadyError("the weights in use failed their probe"))

    async def reset_prefix_cache(self) -> None:
        """See `Engine.reset_prefix_cache`."""
        self._epoch += 1

    def health(self) -> EngineHealth:
        """See `Engine.health`."""
        error = self._client.error
        num_running = min(len(self._streams), self._options.num_running_max)
        return EngineHealth(
            ready=self._is_proven and not error,
            paused=self._is_paused,
            policy_version=self._version,
            num_running=num_running,
            num_waiting=len(self._streams) - num_running,
            error=error,
        )

    def metrics(self) -> EngineMetrics:
        """See `Engine.metrics`."""
        running = time.monotonic() - self._busy_since if self._busy_since else 0.0
        return msgspec.structs.replace(
            self._metrics,
            busy_s=self._metrics.busy_s + running,
            processes_s=self._client.processor_s,
        )

    def capabilities(self) -> EngineCapabilities:
        """See `Engine.capabilities`."""
        return self._capabilities("vllm", "vllm", cache_block=self._cache_block)
