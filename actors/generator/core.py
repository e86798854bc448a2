"""Continuous batching: which requests share the next step, and what each gets out of it.

    waiting --acquire a row--> prefilling --last prompt token computed--> decoding --> finished

Every method runs on the engine's one worker thread. A step decodes one token for every decoding
request and computes up to `prefill_tokens_max` prompt tokens beside them.

A request inside the torch engine: what was asked, and what came of it so far.

One token for each request of a step: shaped, drawn, pushed.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from penstock.actors.generator.decoders.graph import GraphDecoder
from penstock.actors.generator.decoders.native import NativeDecoder
from penstock.actors.generator.decoders.packed import Decoder, PrefillChunk, StepBatch
from penstock.actors.generator.engine import (
    EngineMetrics,
    InvalidRequestError,
    RequestFailedError,
    TokenChunk,
)
from penstock.actors.generator.kv_cache import CacheRow, SlotCache, shared_prefix
from penstock.actors.generator.options import EngineOptions
from penstock.actors.generator.sampler import (
    SamplingBatch,
    Shaped,
    TurnGrammar,
    TurnShaper,
    finite_rows,
    top_tokens,
    uniforms_for,
)
from penstock.actors.policy.config import ExactModeError, PolicyConfig
from penstock.actors.policy.device import open_device
from penstock.actors.policy.model import Policy
from penstock.actors.policy.probe import greedy_logprobs, probe_prompts
from penstock.kernels.decode.layout import DecodeWeights
from penstock.kernels.ops import raise_deferred_errors
from penstock.messages.errors import PenstockError
from penstock.messages.rollout import StopReason, VersionSpan
from penstock.messages.task import Sampling


class GenerationRequest:
    """Belongs to the engine's worker thread once it is added."""

    def __init__(  # noqa: PLR0913 - what was asked
        self,
        token_ids: np.ndarray,
        sampling: Sampling,
        request_id: str,
        session_id: str,
        routes_from: int,
        *,
        num_resumed: int = 0,
        grammar: TurnGrammar | None = None,
    ) -> None:
        self.request_id = request_id
        self.session_id = session_id
        self.prompt = np.ascontiguousarray(token_ids, dtype=np.int32)
        self.num_prompt_tokens = len(self.prompt)
        self.sampling = sampling
        self.routes_from = routes_from
        self.stop_ids = frozenset(sampling.stop_token_ids)
        self.uniforms = uniforms_for(sampling, num_resumed)
        self.shaper = TurnShaper.of(sampling, grammar)
        self.num_resumed = num_resumed
        self.num_sampled = 0
        self.is_decoding = False
        """Whether all of its prompt is computed."""
        self.is_suspect = False
        """Whether it shared a step that failed, and has had none for itself since."""
        self.last_token = -1
        self.row: CacheRow | None = None
        self._created = time.perf_counter()
        self._queue_ms = 0.0
        self._num_cached = 0
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._shaped: list[Shaped] = []
        self._top: list[tuple[np.ndarray, np.ndarray]] = []
        self._next: Shaped | None = None
        """Of the token that is about to be drawn."""
        self._next_top: tuple[np.ndarray, np.ndarray] | None = None

    def start(self, row: CacheRow) -> None:
        """Take a row whose first `length` tokens are cached."""
        self.row = row
        self._num_cached = row.length
        self._queue_ms = (time.perf_counter() - self._created) * 1e3

    def begin(self, vocab_size: int) -> None:
        """Take in what the turn has already.

        Raises:
            InvalidRequestError: Its grammar does not allow that.

        """
        if self.shaper is not None:
            self.shaper.begin(self.prompt, vocab_size, self.num_resumed)

    @property
    def is_shaped(self) -> bool:
        """Whether `shape` has anything to do."""
        return self.shaper is not None or self.sampling.num_top_logprobs > 0

    def shape(self, logits: torch.Tensor) -> None:
        """Shape the next token's logits [V], in place.

        Raises:
            InvalidRequestError: Of its grammar.

        """
        if self.shaper is not None:
            self._next = self.shaper.shape(logits)
        if self.sampling.num_top_logprobs:
            count = self.sampling.num_top_logprobs
            self._next_top = top_tokens(logits, self.sampling.temperature, count)

    def push(self, token_id: int, logprob: float) -> None:
        """Note one sampled token.

        Raises:
            InvalidRequestError: Its grammar has become too complex.

        """
        if self.shaper is not None:
            self.shaper.accept(token_id)
        if self._next is not None:
            self._shaped.append(self._next)
        if self._next_top is not None:
            self._top.append(self._next_top)
        self.last_token = token_id
        self.num_sampled += 1
        self._token_ids.append(token_id)
        self._logprobs.append(logprob)

    def stop_reason(self, num_tokens_max: int) -> StopReason | None:
        """Say whether the last token ended the request."""
        if self.last_token in self.stop_ids:
            return StopReason.STOP
        full = self.num_prompt_tokens + self.num_sampled >= num_tokens_max
        if full or self.num_sampled >= self.sampling.num_tokens_max:
            return StopReason.LENGTH
        return None

    def restart(self, context: np.ndarray) -> None:
        """Go on as a request whose prompt is all that was computed and sampled so far."""
        self.prompt = context
        self.is_decoding = False

    @property
    def num_pending(self) -> int:
        """Sampled tokens that no chunk has carried yet."""
        return len(self._token_ids)

    def flush(
        self,
        policy_version: int,
        stop_reason: StopReason | None = None,
        routed_experts: np.ndarray | None = None,
        route_spans: Sequence[VersionSpan] = (),
        *,
        fault: Exception | None = None,
    ) -> TokenChunk:
        """Make a chunk of what is pending."""
        supports = [one.support for one in self._shaped if one.support is not None]
        ids, logprobs = zip(*self._top, strict=True) if self._top else ((), ())
        chunk = TokenChunk(
            token_ids=np.array(self._token_ids, dtype=np.int32),
            behavior_logprobs=np.array(self._logprobs, dtype=np.float32),
            policy_version=policy_version,
            stop_reason=stop_reason,
            support=np.stack(supports) if supports else None,
            is_forced=np.array([one.is_forced for one in self._shaped], dtype=bool),
            top_ids=np.stack(ids) if ids else None,
            top_logprobs=np.stack(logprobs) if logprobs else None,
            routed_experts=routed_experts,
            routes_from=self.routes_from,
            route_spans=tuple(route_spans),
            num_cached_tokens=self._num_cached,
            queue_ms=self._queue_ms,
            error=_told(fault),
            is_refused=isinstance(fault, InvalidRequestError),
        )
        self._token_ids, self._logprobs = [], []
        self._shaped, self._top = [], []
        return chunk


def _told(fault: Exception | None) -> str:
    if fault is None:
        return ""
    return str(fault) if isinstance(fault, PenstockError) else repr(fault)


NO_NUMBERS = RequestFailedError("the logits of its context are no finite numbers")
Logits = np.ndarray | torch.Tensor
Sample = Callable[[Logits, SamplingBatch], tuple[list[int], list[float]]]


def draw(
    requests: Sequence[GenerationRequest], logits: Logits, sample: Sample
) -> list[Exception | None]:
    """Give each request its next token.

    Args:
        requests: M of them.
        logits: float32 [M, V]; overwritten.
        sample: the decoder's.

    Returns:
        Why a request got none: `NO_NUMBERS`, or an `InvalidRequestError` of its own grammar.

    """
    faults: list[Exception | None] = [None] * len(requests)
    is_finite = finite_rows(logits)
    if not is_finite.all():
        logits[~is_finite] = 0.0
    for index, request in enumerate(requests):
        if not is_finite[index]:
            faults[index] = NO_NUMBERS
        elif request.is_shaped:
            faults[index] = _try_shape(request, logits[index])
    batch = SamplingBatch(
        temperatures=[request.sampling.temperature for request in requests],
        uniforms=[request.uniforms[request.num_sampled] for request in requests],
    )
    token_ids, logprobs = sample(logits, batch)
    drawn = zip(requests, token_ids, logprobs, strict=True)
    for index, (request, token_id, logprob) in enumerate(drawn):
        if faults[index] is None:
            faults[index] = _try_push(request, token_id, logprob)
    return faults


def _try_shape(request: GenerationRequest, row: Logits) -> InvalidRequestError | None:
    try:
        request.shape(row if isinstance(row, torch.Tensor) else torch.from_numpy(row))
    except InvalidRequestError as error:
        return error
    return None


def _try_push(
    request: GenerationRequest, token_id: int, logprob: float
) -> InvalidRequestError | None:
    try:
        request.push(token_id, logprob)
    except InvalidRequestError as error:
        return error
    return None


_DEVICE = "generator.device"
_SHARED_PREFIX_WORTH = 16
"""Wait for a prompt in prefill if it saves computing at least this many tokens."""
FAILURES_IN_A_ROW_MAX = 8
"""Requests that failed one after the other, none succeeding in between: the engine is broken."""

Output = tuple[GenerationRequest, TokenChunk]


class EngineCore:
    """Scheduler, cache, decoder and sampler behind `TorchEngine`."""

    def __init__(self, config: PolicyConfig, options: EngineOptions) -> None:
        config.check_device(options.device, _DEVICE)
        self.device = open_device(options.device, _DEVICE)
        self.options = options
        self.metrics = EngineMetrics()
        self.model: Policy | DecodeWeights | None = None
        """What the decoder's `prepare` made of the weights in use."""
        self.policy_version = -1
        num_rows = options.num_running_max + options.num_parked_max
        self.cache = SlotCache(config, num_rows, options.num_tokens_max, self.device)
        self.waiting: deque[GenerationRequest] = deque()
        self.prefilling: list[GenerationRequest] = []
        self.decoding: list[GenerationRequest] = []
        """Request i runs in row i."""
        self.fault = ""
        """Why no request can be computed any more; empty as long as some can."""
        self._num_failures = 0
        """In a row."""
        self._vocab_size = config.vocab_size
        self._recomputes = config.numerics.is_exact
        self.decoder: Any = _decoder(config, self.cache, options.num_threads)
        """One of three: `prepare` weights, `step` with them, `sample` from what the step gave."""

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return len(self.prefilling) + len(self.decoding)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def swap_model(self, model: Policy | DecodeWeights, policy_version: int) -> list[Output]:
        """Use other weights from the next step on; flush what the old ones sampled."""
        flushed = [
            (request, request.flush(self.policy_version))
            for request in self.decoding
            if request.num_pending
        ]
        self.model, self.policy_version = model, policy_version
        if self._recomputes:
            self._restart(policy_version)
        else:
            self.cache.mark_stale(policy_version)
        return flushed

    def probe(self) -> list[float]:
        """Compute the probe, one prompt after the other, in a row that no request runs in."""
        row, values = self.cache.spare_row(), list[float]()
        for prompt in probe_prompts(self._vocab_size):
            chunk = PrefillChunk(row.index, 0, len(prompt))
            batch = StepBatch(prompt.tolist(), [], [chunk], [len(prompt) - 1])
            values += greedy_logprobs(torch.as_tensor(self.decoder.step(self.model, batch)))
        return values

    def disown(self) -> list[Output]:
        """Hold no weights any more, as these are wrong, and nothing that they computed."""
        self.model, ended = None, self.abort(None)
        self.cache.forget_parked()
        return ended

    def _restart(self, policy_version: int) -> None:
        """Compute every context again: exact mode mixes no weights within one."""
        self.prefilling = [*self.decoding, *self.prefilling]
        self.decoding = []
        for request in self.prefilling:
            row = request.row
            assert row is not None
            if request.is_decoding:
                self.cache.tokens[row.index, row.length] = request.last_token
                request.restart(self.cache.tokens[row.index, : row.length + 1].copy())
            request.routes_from = 0
        self.cache.forget_all(policy_version)

    def abort(self, request_id: str | None) -> list[Output]:
        """End one request, or all."""
        requests = [*self.waiting, *self.prefilling, *self.decoding]
        chosen = [r for r in requests if request_id in (None, r.request_id)]
        self.metrics.num_aborted += len(chosen)
        return [(request, self._finish(request, StopReason.ABORTED)) for request in chosen]

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Run one step; returns the chunks that came due.

        A step that fails is taken again for each of its requests alone, and the one that fails
        then is ended with the error: it costs the others a step each. Where request after request
        fails, it is the engine's failure: `fault` has it.
        """
        assert self.model is not None
        started = time.perf_counter()
        suspect = next((request for request in self.prefilling if request.is_suspect), None)
        if self.waiting and suspect is None:
            self._admit()
        members = [*self.decoding, *self.prefilling] if suspect is None else [suspect]
        batch, sampled = self._plan(members)
        if not batch.token_ids:
            return []
        try:
            logits = self.decoder.step(self.model, batch)
            self._advance(batch)
            outputs = self._sample(sampled, logits) if sampled else []
        except Exception as error:
            return self._isolate(members, error)
        raise_deferred_errors()  # Before a client gets what a bad value gave.
        self.metrics.busy_s += time.perf_counter() - started
        return outputs

    def _isolate(self, members: list[GenerationRequest], error: Exception) -> list[Output]:
        """Have each member of a failed step stepped alone; one that failed alone is ended."""
        if len(members) == 1:
            self._count_failures(1, repr(error))
            return [(members[0], self._finish(members[0], StopReason.ABORTED, fault=error))]
        for request in members:
            row = request.row
            assert row is not None
            if request.is_decoding:
                length = request.num_prompt_tokens + request.num_sampled
                self.cache.tokens[row.index, length - 1] = request.last_token
                request.restart(self.cache.tokens[row.index, :length].copy())
            row.length = min(row.length, len(request.prompt) - 1)
            row.note_version(self.policy_version)
            request.is_suspect = True
        self.prefilling, self.decoding = members, []
        return []

    def _count_failures(self, count: int, error: str) -> None:
        self._num_failures += count
        if self._num_failures >= FAILURES_IN_A_ROW_MAX:
            self.fault = f"{self._num_failures} requests failed in a row, the last: {error}"

    def _admit(self) -> None:
        """Give rows to waiting requests, in order, passing over those worth deferring."""
        deferred: list[GenerationRequest] = []
        while self.waiting and self.num_running < self.options.num_running_max:
            request = self.waiting.popleft()
            if self._is_better_later(request):
                deferred.append(request)
                continue
            if self._recomputes and not self.cache.holds(request.session_id):
                request.routes_from = 0
            row = self.cache.acquire(request.prompt, request.session_id)
            assert row is not None, "there are more rows than running requests"
            request.start(row)
            self.metrics.num_cached_tokens += row.length
            self.prefilling.append(request)
        self.waiting.extendleft(reversed(deferred))

    def _is_better_later(self, request: GenerationRequest) -> bool:
        """Return whether a prompt that is being computed will share more than the cache does."""
        if not self.prefilling:
            return False
        _, cached = self.cache.match(request.prompt, request.session_id)
        coming = max(shared_prefix(other.prompt, request.prompt) for other in self.prefilling)
        return min(coming, len(request.prompt) - 1) - cached >= _SHARED_PREFIX_WORTH

    def _plan(
        self, members: Sequence[GenerationRequest]
    ) -> tuple[StepBatch, list[GenerationRequest]]:
        """Choose the tokens of the next step, and the requests that get a token sampled from it.

        Members are all that decode, if any, then those in prefill.
        """
        sampled = [request for request in members if request.is_decoding]
        token_ids = [request.last_token for request in sampled]
        positions = [self.cache.rows[i].length for i in range(len(sampled))]
        outputs, chunks = list(range(len(sampled))), []
        budget = self.options.prefill_tokens_max
        for request in members[len(sampled) :]:
            row = request.row
            assert row is not None
            num_tokens = min(budget, len(request.prompt) - row.length)
            if num_tokens == 0:
                break
            budget -= num_tokens
            chunks.append(PrefillChunk(row.index, row.length, num_tokens))
            end = row.length + num_tokens
            token_ids += request.prompt[row.length : end].tolist()
            if end == len(request.prompt):
                outputs.append(len(token_ids) - 1)
                sampled.append(request)
        return StepBatch(token_ids, positions, chunks, outputs), sampled

    def _advance(self, batch: StepBatch) -> None:
        """Note that the batch's tokens are in the cache now."""
        num_decode = len(batch.decode_positions)
        at = (np.arange(num_decode), np.array(batch.decode_positions, dtype=np.int64))
        self.cache.tokens[at] = batch.token_ids[:num_decode]
        for row in self.cache.rows[:num_decode]:
            row.length += 1
        for chunk in batch.chunks:
            self.cache.rows[chunk.row].length += chunk.num_tokens
            self.metrics.num_prefill_tokens += chunk.num_tokens

    def _sample(self, requests: list[GenerationRequest], logits: Any) -> list[Output]:
        faults = draw(requests, logits, self.decoder.sample)
        num_broken = sum(fault is NO_NUMBERS for fault in faults)
        if num_broken < len(requests):
            self._num_failures = 0
        self._count_failures(num_broken, str(NO_NUMBERS))
        self.metrics.num_generated_tokens += faults.count(None)
        outputs = [
            (request, self._finish(request, StopReason.ABORTED, fault=fault))
            for request, fault in zip(requests, faults, strict=True)
            if fault is not None
        ]
        for request, fault in zip(requests, faults, strict=True):
            if fault is None:
                outputs += self._pushed(request)
        return outputs

    def _pushed(self, request: GenerationRequest) -> list[Output]:
        """See a request's new token: it may be the last, or make a chunk come due."""
        request.is_suspect = False
        reason = request.stop_reason(self.options.num_tokens_max)
        if reason is not None:
            return [(request, self._finish(request, reason))]
        if not request.is_decoding:
            self._promote(request)
        if request.num_sampled == 1 or request.num_pending >= self.options.chunk_tokens:
            return [(request, request.flush(self.policy_version))]
        return []

    def _promote(self, request: GenerationRequest) -> None:
        assert request.row is not None
        request.is_decoding = True
        self.prefilling.remove(request)
        self.cache.swap(request.row, len(self.decoding))
        self.decoding.append(request)

    def _finish(
        self,
        request: GenerationRequest,
        reason: StopReason,
        *,
        fault: Exception | None = None,
    ) -> TokenChunk:
        """Take a request out, wherever it is; its row stays cached, unless it failed."""
        row, routes, spans = request.row, None, []
        if row is None:
            self.waiting.remove(request)
        else:
            # Sampled but not yet fed back: the last token has no routes and no cache entry.
            routes = self.cache.routes[row.index, request.routes_from : row.length].numpy().copy()
            spans = row.version_spans(request.routes_from)
            if not request.is_decoding:
                self.prefilling.remove(request)
            else:
                last = self.decoding.pop()
                if last is not request:
                    assert last.row is not None
                    self.decoding[row.index] = last
                    self.cache.swap(row, last.row.index)
            if self._recomputes and reason is StopReason.ABORTED:
                row.session_id = ""  # its routes, perhaps computed again, reached no client
            if fault is not None:
                row.length, row.session_id = 0, ""
            self.cache.release(row)
        return request.flush(self.policy_version, reason, routes, spans, fault=fault)


def _decoder(
    config: PolicyConfig, cache: SlotCache, num_threads: int
) -> NativeDecoder | Decoder | GraphDecoder:
    if cache.kv.is_cuda:
        return GraphDecoder(config, cache)
    native = NativeDecoder.load(config, cache, num_threads)
    if config.numerics.is_exact and native is None:
        raise ExactModeError("policy.numerics.mode: exact needs the compiled step here too")
    return native or Decoder(config, cache)
