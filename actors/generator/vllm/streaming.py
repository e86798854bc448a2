"""Streams one turn: converts vLLM's outputs and the worker's records into token chunks.

Each chunk has tokens of one policy version only.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
import numpy as np

from penstock.actors.generator.engine import (
    EngineDiedError,
    EngineMetrics,
    InvalidRequestError,
    RequestFailedError,
    TokenChunk,
)
from penstock.actors.generator.vllm.client import VllmClient
from penstock.actors.generator.vllm.turns import TurnRecord, TurnSettings
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.native import has_wide_routes
from penstock.kernels.reference.routing import bits_per_id, unpack_routes
from penstock.kernels.support import row_bytes
from penstock.messages.errors import DeadlineError
from penstock.messages.rollout import StopReason, VersionSpan


class DrawnToken(NamedTuple):
    """One sampled token, decoded from the output of `TurnSampler`."""

    token_id: int
    logprob: float
    policy_version: int
    top_ids: list[int]
    top_logprobs: list[float]

    @property
    def is_fault(self) -> bool:
        """Whether this is a placeholder for a token that could not be drawn."""
        return math.isnan(self.logprob)


def drawn_tokens(output: Any, vocab_size: int) -> list[DrawnToken]:
    """Return the tokens of a `CompletionOutput`."""
    return [
        _drawn_token(token_id, pairs, vocab_size)
        for token_id, pairs in zip(output.token_ids, output.logprobs or (), strict=True)
    ]


def _drawn_token(token_id: int, pairs: dict[int, Any], vocab_size: int) -> DrawnToken:
    # `TurnSampler` encodes the version as an id beyond the vocabulary.
    versions = [other - vocab_size for other in pairs if other >= vocab_size]
    # vLLM ranks pairs by column: the sampled token in the first has rank 0, unless it is also
    # among the most likely tokens, whose columns start at rank 2.
    top = sorted((pair.rank, other) for other, pair in pairs.items() if pair.rank >= 2)
    return DrawnToken(
        token_id=token_id,
        logprob=pairs[token_id].logprob,
        policy_version=versions[0],
        top_ids=[other for _, other in top],
        top_logprobs=[pairs[other].logprob for _, other in top],
    )


def chunks_of(
    tokens: Sequence[DrawnToken], record: TurnRecord | None, vocab_size: int
) -> Iterator[TokenChunk]:
    """Yield one chunk for each run of tokens sampled under the same version.

    Args:
        tokens: Consecutive tokens.
        record: Record of the worker about these tokens, if there is one.
        vocab_size: Vocabulary size of the policy.

    """
    start = 0
    for version, run in groupby(tokens, lambda token: token.policy_version):
        group = list(run)
        end = start + len(group)
        supports, forced = _shaped(record, start, end, vocab_size)
        has_top = bool(group[0].top_ids)
        yield TokenChunk(
            token_ids=np.array([token.token_id for token in group], np.int32),
            behavior_logprobs=np.array([token.logprob for token in group], np.float32),
            policy_version=version,
            support=supports,
            is_forced=forced,
            top_ids=np.array([t.top_ids for t in group], np.int32) if has_top else None,
            top_logprobs=np.array([t.top_logprobs for t in group], np.float32) if has_top else None,
        )
        start = end


def _shaped(
    record: TurnRecord | None, start: int, end: int, vocab_size: int
) -> tuple[np.ndarray | None, np.ndarray]:
    if record is None or not record.forced:
        return None, np.empty(0, bool)
    forced = np.frombuffer(record.forced, bool)[start:end]
    if not record.supports:
        return None, forced
    supports = np.frombuffer(record.supports, np.uint8).reshape(-1, row_bytes(vocab_size))
    return supports[start:end], forced


def version_spans(versions: np.ndarray) -> tuple[VersionSpan, ...]:
    """Return the versions of R positions, int32 [R], as runs."""
    return tuple(
        VersionSpan(policy_version=int(version), num_tokens=len(list(run)))
        for version, run in groupby(versions.tolist())
    )


_REQUEST_S = 600.0
"""Longest wait for the next chunk of a request in seconds, including pauses."""
_RECORD = msgspec.msgpack.Decoder(TurnRecord)
_ENDS = {"length": StopReason.LENGTH, "stop": StopReason.STOP, "abort": StopReason.ABORTED}


def route_dtype(config: PolicyConfig) -> np.dtype:
    """Return the dtype of the policy's routes."""
    return np.dtype(np.int16 if has_wide_routes(config) else np.uint8)


class TurnStream:
    """One request in flight at vLLM."""

    def __init__(
        self, client: VllmClient, config: PolicyConfig, metrics: EngineMetrics, key: str
    ) -> None:
        """Prepare the stream; `chunks` sends the request.

        Args:
            client: Client of vLLM.
            config: Shape of the policy.
            metrics: Counters to increment.
            key: Key of the turn, unique in the engine's lifetime.

        """
        self._client, self._config, self._metrics = client, config, metrics
        self.key = key
        self._ended = asyncio.Event()
        self._fault: Exception | None = None
        self._num_tokens = 0

    def end(self, fault: Exception | None = None) -> None:
        """End the request as aborted, or with an error."""
        self._fault = self._fault or fault
        self._ended.set()

    async def chunks(
        self, prompt: list[int], settings: TurnSettings, cache_salt: str, routes_from: int
    ) -> AsyncGenerator[TokenChunk, None]:
        """Yield the chunks of the turn; the last one has a stop reason and the routes.

        Raises:
            InvalidRequestError: The grammar became too complex or allows no token.
            RequestFailedError: The request cannot be computed.
            EngineDiedError: vLLM died while it computed the request.

        """
        num_cached, reason = 0, None
        outputs = self._client.generate(prompt, settings, cache_salt)
        last, record = self._nothing(), TurnRecord()
        try:
            while reason is None and (output := await self._next(outputs)) is not None:
                if self._num_tokens == 0:
                    num_cached = output.num_cached_tokens or 0
                    self._metrics.num_cached_tokens += num_cached
                    self._metrics.num_prefill_tokens += len(prompt) - num_cached
                reason = _ENDS[output.outputs[0].finish_reason] if output.finished else None
                # One chunk is held back: the last one gets the stop reason and the routes.
                for chunk in await self._read(output.outputs[0], settings):
                    if len(last.token_ids):
                        yield last
                    last = msgspec.structs.replace(chunk, num_cached_tokens=num_cached)
                if reason is None and len(last.token_ids):
                    yield last
                    last = self._nothing(last.policy_version)
        finally:
            await outputs.aclose()
            # However the turn ends: asking for the last record makes the worker forget the turn.
            if not self._client.error:
                record = await self._take(is_last=True)
        if self._fault is not None:
            raise self._fault
        last = msgspec.structs.replace(
            last, num_cached_tokens=num_cached, stop_reason=reason or StopReason.ABORTED
        )
        yield self._with_routes(last, record, len(prompt), routes_from)

    async def _read(self, output: Any, settings: TurnSettings) -> list[TokenChunk]:
        """Return the tokens of an output as chunks of one version each."""
        vocab_size = self._config.vocab_size
        tokens = drawn_tokens(output, vocab_size)
        self._num_tokens += len(tokens)
        self._metrics.num_generated_tokens += len(tokens)
        has_fault = any(token.is_fault for token in tokens)
        # Only where there is something to read: each record is a call into vLLM's process.
        needs_record = has_fault or settings.sampling.is_truncated
        record = await self._take() if needs_record else None
        if has_fault and record is not None:
            kind = InvalidRequestError if record.is_refused else RequestFailedError
            raise kind(record.fault)
        return list(chunks_of(tokens, record, vocab_size))

    async def _next(self, outputs: Any) -> Any:
        """Return the next output of vLLM, or None if `end` was called."""
        if self._ended.is_set():
            return None
        coming = asyncio.ensure_future(anext(outputs))
        ended = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait(
                {coming, ended}, timeout=_REQUEST_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            ended.cancel()
            if not coming.done():
                coming.cancel()
            # Wait for the cancellation: an async generator that is running cannot be closed.
            await asyncio.gather(coming, ended, return_exceptions=True)
        if self._ended.is_set():
            return None
        if coming.cancelled():
            raise DeadlineError(f"request {self.key}: no chunk within {_REQUEST_S:g} s")
        if error := coming.exception():
            if self._client.error:
                raise EngineDiedError(f"vLLM died: {self._client.error}") from error
            raise RequestFailedError(f"request {self.key}: {error!r}") from error
        return coming.result()

    def _nothing(self, policy_version: int = -1) -> TokenChunk:
        ids, logprobs = np.empty(0, np.int32), np.empty(0, np.float32)
        return TokenChunk(token_ids=ids, behavior_logprobs=logprobs, policy_version=policy_version)

    def _with_routes(
        self, chunk: TokenChunk, record: TurnRecord, num_prompt: int, routes_from: int
    ) -> TokenChunk:
        """Add the experts of all positions except the last, whose token was never fed back."""
        layers, slots = self._config.num_hidden_layers, self._config.num_experts_per_tok
        dtype, end = route_dtype(self._config), num_prompt + self._num_tokens - 1
        if not self._config.num_experts:
            routes = np.empty((end - routes_from, layers, 0), dtype)
            return msgspec.structs.replace(chunk, routed_experts=routes, routes_from=routes_from)
        packed = np.frombuffer(record.routes, np.uint8)
        packed = packed.reshape(-1, -(-layers * slots * bits_per_id(self._config.num_experts) // 8))
        routes = unpack_routes(packed, layers, slots, self._config.num_experts).astype(dtype)
        versions = np.frombuffer(record.versions, np.int32)[routes_from:end]
        return msgspec.structs.replace(
            chunk,
            routed_experts=routes[routes_from:end],
            routes_from=routes_from,
            route_spans=version_spans(versions),
        )

    async def _take(self, *, is_last: bool = False) -> TurnRecord:
        arguments = self.key, self._num_tokens, is_last
        return _RECORD.decode(await self._client.call("penstock_take", *arguments))
