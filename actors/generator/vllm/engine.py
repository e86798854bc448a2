"""vLLM behind `Engine`."""

import asyncio
import itertools
import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.actors.generator.checks import check_request, open_grammar
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
from penstock.actors.generator.shaper import TurnShaper
from penstock.actors.generator.vllm.chunks import chunks_of, drawn_tokens, version_spans
from penstock.actors.generator.vllm.mirror import WeightMirror
from penstock.actors.generator.vllm.options import (
    VllmOptions,
    check_policy,
    engine_arguments,
    set_environment,
)
from penstock.actors.generator.vllm.turns import EXTRA, TurnRecord, TurnSettings
from penstock.actors.policy.checkpoint import tensor_shapes
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.hf.config import CONFIG_FILE, config_json
from penstock.actors.policy.native import has_wide_routes
from penstock.actors.policy.probe import check_probe, probe_prompts
from penstock.actors.policy.tokenizer import Tokenizer
from penstock.kernels.delta import Patch
from penstock.messages.errors import CorruptDataError, DeadlineError, QueueFullError
from penstock.messages.rollout import StopReason
from penstock.messages.task import Sampling

_REQUEST_S = 600.0
"""Longest wait for a request's next chunk, pauses included."""
_CALL_S = 120.0
"""Longest wait for what a worker is asked to do."""
_SESSIONS_MAX = 65_536
_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of our own is made in it
_RECORD = msgspec.msgpack.Decoder(TurnRecord)
_ENDS = {"length": StopReason.LENGTH, "stop": StopReason.STOP, "abort": StopReason.ABORTED}


class _Stream:
    """A request in flight."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.ended = asyncio.Event()
        """From outside: aborted, or the weights are wrong."""
        self.fault: Exception | None = None
        self.num_tokens = 0


class VllmEngine:
    """An `Engine`; construct it, `await start()`, then give it weights."""

    def __init__(
        self, config: PolicyConfig, options: VllmOptions, tokenizer: Tokenizer, stop_ids: list[int]
    ) -> None:
        """Prepare; nothing of vLLM is imported yet.

        Args:
            config: Of the policy.
            options: Bounds.
            tokenizer: The policy's, for grammars.
            stop_ids: Tokens that end a turn, for grammars.

        Raises:
            ConfigError: vLLM does not compute this policy.

        """
        check_policy(config, options)
        self._config, self._options = config, options
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self._grammars = GrammarMasks(tokenizer, stop_ids, config.vocab_size)
        self._route_dtype = np.int16 if has_wide_routes(config) else np.uint8
        self._folder = tempfile.TemporaryDirectory(
            prefix="penstock-vllm-", dir=_MEMORY if _MEMORY.is_dir() else None
        )
        self._mirror = WeightMirror(tensor_shapes(config), Path(self._folder.name))
        self._weights_lock = asyncio.Lock()
        self._streams: dict[str, _Stream] = {}
        self._sessions: OrderedDict[str, int] = OrderedDict()
        """Session -> the cache epoch of its last turn."""
        self._epoch = 0
        self._keys = itertools.count()
        self._metrics = EngineMetrics()
        self._busy_since = 0.0
        self._probe: list[float] = []
        self._version, self._is_proven, self._is_paused = -1, False, False
        self._llm: Any = None
        self._params: Any = None

    async def start(self) -> None:
        """Start vLLM's process; takes some ten seconds."""
        folder = Path(self._folder.name) / "model"
        folder.mkdir()
        (folder / CONFIG_FILE).write_text(config_json(self._config))
        set_environment(self._options, os.environ)
        from vllm import SamplingParams
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM

        def params(**values: Any) -> Any:
            kind = RequestOutputKind.DELTA
            return SamplingParams(
                temperature=0.0, ignore_eos=True, detokenize=False, output_kind=kind, **values
            )

        self._params = params
        arguments = AsyncEngineArgs(**engine_arguments(self._options, folder))
        self._llm = AsyncLLM.from_engine_args(arguments)
        await self._call(
            "penstock_start",
            self._config.vocab_size,
            self._config.num_experts_per_tok if self._config.num_experts else 0,
            np.dtype(self._route_dtype).name,
            self._tokenizer.to_json(),
            self._stop_ids,
        )

    async def stop(self) -> None:
        """Abort everything and end vLLM's process."""
        await self.abort()
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)
        self._folder.cleanup()

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
        self._check_ready(request_id)
        check_request(
            *(token_ids, sampling, routes_from, num_resumed),
            vocab_size=self._config.vocab_size,
            num_tokens_max=self._options.num_tokens_max,
        )
        if self._sessions.get(session_id) != self._epoch:
            routes_from = 0  # What the session had cached is computed again with other weights.
        room = min(sampling.num_tokens_max, self._options.num_tokens_max - len(token_ids))
        sampling = msgspec.structs.replace(sampling, num_tokens_max=room)
        stream = _Stream(f"{next(self._keys)}")
        self._streams[request_id] = stream
        self._busy_since = self._busy_since or time.monotonic()
        is_over = False
        try:
            await self._check_grammar(token_ids, sampling, num_resumed)
            self._note_session(session_id)
            async for chunk in self._chunks(token_ids, sampling, stream, num_resumed):
                is_over = chunk.stop_reason is not None
                if is_over and self._config.num_experts:
                    yield await self._with_routes(chunk, stream, len(token_ids), routes_from)
                else:
                    yield chunk
        finally:
            del self._streams[request_id]
            self._metrics.num_aborted += not is_over or stream.ended.is_set()
            if not self._streams:
                self._metrics.busy_s += time.monotonic() - self._busy_since
                self._busy_since = 0.0

    async def _chunks(
        self, token_ids: np.ndarray, sampling: Sampling, stream: _Stream, num_resumed: int
    ) -> AsyncIterator[TokenChunk]:
        """Yield what vLLM samples; the last chunk has a stop reason."""
        settings = TurnSettings(stream.key, sampling, num_resumed)
        params = self._params(
            max_tokens=sampling.num_tokens_max,
            stop_token_ids=list(sampling.stop_token_ids),
            logprobs=1 + sampling.num_top_logprobs,
            extra_args={EXTRA: msgspec.msgpack.encode(settings)},
        )
        prompt = {"prompt_token_ids": token_ids.tolist(), "cache_salt": f"{self._epoch}"}
        num_cached = 0
        is_shaped = sampling.is_truncated
        outputs = self._llm.generate(prompt, params, stream.key)
        try:
            while (output := await self._next(outputs, stream)) is not None:
                if stream.num_tokens == 0:
                    num_cached = output.num_cached_tokens or 0
                    self._count_prompt(len(token_ids), num_cached)
                tokens = drawn_tokens(output.outputs[0], self._config.vocab_size)
                has_fault = any(token.is_fault for token in tokens)
                stream.num_tokens += len(tokens)
                record = await self._take(stream) if is_shaped or has_fault else None
                if has_fault and record is not None:
                    refused = InvalidRequestError if record.is_refused else RequestFailedError
                    raise refused(f"request {stream.key}: {record.fault}")
                chunks = list(chunks_of(tokens, record, self._config.vocab_size))
                self._metrics.num_generated_tokens += len(tokens)
                reason = _ENDS[output.outputs[0].finish_reason] if output.finished else None
                for chunk in chunks[:-1]:
                    yield msgspec.structs.replace(chunk, num_cached_tokens=num_cached)
                last = chunks[-1] if chunks else self._nothing()
                yield msgspec.structs.replace(
                    last, num_cached_tokens=num_cached, stop_reason=reason
                )
                if reason is not None:
                    return
        finally:
            await outputs.aclose()
        if stream.fault is not None:
            raise stream.fault
        yield msgspec.structs.replace(self._nothing(), stop_reason=StopReason.ABORTED)

    async def _next(self, outputs: Any, stream: _Stream) -> Any:
        """Return vLLM's next output, or None if the request was ended from outside.

        Raises:
            EngineDiedError: vLLM's process ended.
            DeadlineError: Nothing came.

        """
        if stream.ended.is_set():
            return None
        coming = asyncio.ensure_future(anext(outputs))
        ended = asyncio.ensure_future(stream.ended.wait())
        try:
            await asyncio.wait(
                {coming, ended}, timeout=_REQUEST_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            ended.cancel()
            if not coming.done():
                coming.cancel()
            await asyncio.gather(coming, ended, return_exceptions=True)
        if stream.ended.is_set():
            return None
        if coming.cancelled():
            raise DeadlineError(f"request {stream.key}: no chunk within {_REQUEST_S} s")
        if error := coming.exception():
            died = self._llm.errored
            kind = EngineDiedError if died else RequestFailedError
            raise kind(f"request {stream.key}: {error!r}") from error
        return coming.result()

    def _nothing(self) -> TokenChunk:
        empty = np.empty(0, np.int32), np.empty(0, np.float32)
        return TokenChunk(
            token_ids=empty[0], behavior_logprobs=empty[1], policy_version=self._version
        )

    def _count_prompt(self, num_tokens: int, num_cached: int) -> None:
        self._metrics.num_cached_tokens += num_cached
        self._metrics.num_prefill_tokens += num_tokens - num_cached

    async def _with_routes(
        self, chunk: TokenChunk, stream: _Stream, num_prompt: int, routes_from: int
    ) -> TokenChunk:
        """Add the experts of all positions but the last token's, which were not computed."""
        record = await self._take(stream, is_last=True)
        layers, slots = self._config.num_hidden_layers, self._config.num_experts_per_tok
        routes = np.frombuffer(record.routes, self._route_dtype).reshape(-1, layers, slots)
        end = num_prompt + stream.num_tokens - 1 if stream.num_tokens else 0
        versions = np.frombuffer(record.versions, np.int32)[routes_from:end]
        return msgspec.structs.replace(
            chunk,
            routed_experts=routes[routes_from:end],
            routes_from=routes_from,
            route_spans=version_spans(versions),
        )

    async def _take(self, stream: _Stream, *, is_last: bool = False) -> TurnRecord:
        arguments = stream.key, stream.num_tokens, is_last
        return _RECORD.decode(await self._call("penstock_take", *arguments))

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Have the worker do something; returns what its first rank says."""
        try:
            async with asyncio.timeout(_CALL_S):
                return (await self._llm.collective_rpc(method, args=arguments))[0]
        except TimeoutError as error:
            raise DeadlineError(f"vLLM: {method} not done within {_CALL_S} s") from error

    async def _check_grammar(
        self, token_ids: np.ndarray, sampling: Sampling, num_resumed: int
    ) -> None:
        """Compile the grammar once here, off vLLM's steps, and see what the turn has already."""
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

    def _check_ready(self, request_id: str) -> None:
        if not self.health().ready:
            raise EngineNotReadyError(f"no weights, or not running {self.health().error}".rstrip())
        if request_id in self._streams:
            raise InvalidRequestError(f"request_id {request_id!r} is in flight already")
        if len(self._streams) >= self._options.num_running_max + self._options.num_waiting_max:
            raise QueueFullError(f"{len(self._streams)} requests are in flight, the most allowed")

    async def abort(self, request_id: str | None = None) -> None:
        """See `Engine.abort`."""
        for name, stream in self._streams.items():
            if request_id in (None, name):
                stream.ended.set()
        await asyncio.sleep(0)

    async def pause(self) -> None:
        """See `Engine.pause`."""
        self._is_paused = True
        await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """See `Engine.resume`."""
        self._is_paused = False
        await self._llm.resume_generation()

    async def begin_update(self) -> None:
        """See `Engine.begin_update`."""
        async with self._weights_lock:
            await asyncio.to_thread(self._mirror.begin)

    async def apply(self, patches: Mapping[str, np.ndarray | Patch]) -> None:
        """See `Engine.apply`."""
        async with self._weights_lock:
            await asyncio.to_thread(self._mirror.apply, patches)

    async def commit(
        self, policy_version: int, root_digest: str | None = None, probe: Sequence[float] = ()
    ) -> float:
        """See `Engine.commit`."""
        async with self._weights_lock:
            if root_digest is not None:
                await asyncio.to_thread(self._mirror.verify, root_digest)
            path = str(self._mirror.staged_file)
            started = time.perf_counter()
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            try:
                await self._call("penstock_load", self._mirror.rows, path, policy_version)
                self._mirror.swap()
                self._version, self._epoch, self._is_proven = policy_version, self._epoch + 1, False
                prompts = probe_prompts(self._config.vocab_size).tolist()
                self._probe = await self._call("penstock_probe", prompts)
                try:
                    tolerance = self._options.probe_tolerance
                    check_probe(self._probe, probe, tolerance, policy_version)
                except CorruptDataError:
                    self._disown()
                    raise
                self._is_proven = True
            finally:
                if not self._is_paused:
                    await self._llm.resume_generation()
            self._metrics.last_pause_ms = (time.perf_counter() - started) * 1e3
            return self._metrics.last_pause_ms

    def _disown(self) -> None:
        """End what is in flight: the weights in use are wrong."""
        for stream in self._streams.values():
            stream.fault = EngineNotReadyError("the weights in use were found to be wrong")
            stream.ended.set()

    def probe(self) -> list[float]:
        """See `Engine.probe`."""
        return self._probe

    async def digest(self) -> str:
        """See `Engine.digest`."""
        async with self._weights_lock:
            return await asyncio.to_thread(self._mirror.digest)

    async def reset_prefix_cache(self) -> None:
        """See `Engine.reset_prefix_cache`."""
        self._epoch += 1

    def health(self) -> EngineHealth:
        """See `Engine.health`."""
        error = repr(self._llm.dead_error) if self._llm is not None and self._llm.errored else ""
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
        return msgspec.structs.replace(self._metrics, busy_s=self._metrics.busy_s + running)

    def capabilities(self) -> EngineCapabilities:
        """See `Engine.capabilities`."""
        return EngineCapabilities(
            name="vllm",
            num_tokens_max=self._options.num_tokens_max,
            num_running_max=self._options.num_running_max,
            num_waiting_max=self._options.num_waiting_max,
            arithmetic=f"vllm/{self._config.numerics.expert_format}",
            num_experts=self._config.num_experts,
            cache_block=self._options.cache_block,
        )
