"""Continuous batching in the torch engine: the requests, the scheduler, and one step at a time.

    waiting --acquire a row--> prefilling --last prompt token computed--> decoding --> finished

Every method runs on the engine's single worker thread. A step decodes one token for every decoding
request, or several that a draft foresaw (`drafts.py`), and computes up to `prefill_tokens_max`
prompt tokens in the same batch. For each request that gets tokens, `draw` shapes the logits,
samples, and appends the tokens to the request.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from penstock.actors.generator.decoders.native import NativeDecoder
from penstock.actors.generator.decoders.packed import Decoder, PrefillChunk, StepBatch
from penstock.actors.generator.drafts import DraftIndex
from penstock.actors.generator.engine import EngineMetrics, TokenChunk
from penstock.actors.generator.kv_cache import CacheRow, SlotCache, shared_prefix
from penstock.actors.generator.options import EngineOptions
from penstock.actors.generator.requests import NON_FINITE_LOGITS, GenerationRequest, draw
from penstock.actors.policy.config import ExactModeError, PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.actors.policy.probe import greedy_logprobs, probe_prompts
from penstock.kernels.decode.layout import DecodeWeights
from penstock.messages.rollout import StopReason

log = logging.getLogger(__name__)


_SHARED_PREFIX_WORTH = 16
"""Minimum number of tokens saved for a request to wait for a prompt that is being prefilled."""
FAILURES_IN_A_ROW_MAX = 8
"""Number of consecutive failed requests after which the engine itself is considered broken."""

Output = tuple[GenerationRequest, TokenChunk]


class EngineCore:
    """Scheduler, KV cache, decoder and sampler behind `TorchEngine`."""

    def __init__(self, config: PolicyConfig, options: EngineOptions) -> None:
        self.options = options
        self.metrics = EngineMetrics()
        self.model: Policy | DecodeWeights | None = None
        """Weights in use, in the form that the decoder's `prepare` returned."""
        self.policy_version = -1
        num_rows = options.num_running_max + options.num_parked_max
        self.cache = SlotCache(config, num_rows, options.num_tokens_max)
        self.waiting: deque[GenerationRequest] = deque()
        self.prefilling: list[GenerationRequest] = []
        self.decoding: list[GenerationRequest] = []
        """Requests that decode; request i uses cache row i."""
        self.fault = ""
        """Why the engine can no longer compute anything; empty while it works."""
        self._num_failures = 0
        """Number of consecutive failed requests."""
        self._vocab_size = config.vocab_size
        self._recomputes = config.numerics.is_exact
        self.decoder: Any = _decoder(config, self.cache, options.num_threads)
        """One of the two decoders, with the methods `prepare`, `step` and `sample`."""
        self._drafts = DraftIndex()

    @property
    def num_running(self) -> int:
        """Number of requests that hold a cache row."""
        return len(self.prefilling) + len(self.decoding)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def swap_model(self, model: Policy | DecodeWeights, policy_version: int) -> list[Output]:
        """Use new weights from the next step on; return what the old weights sampled as chunks."""
        # A chunk names one version, so tokens of the old weights must leave before the swap.
        flushed = [
            (request, request.flush(self.policy_version))
            for request in self.decoding
            if request.num_pending
        ]
        self.model, self.policy_version = model, policy_version
        # Other modes keep the KV cache: requests continue on keys of older weights.
        if self._recomputes:
            self._restart(policy_version)
        else:
            self.cache.mark_stale(policy_version)
        return flushed

    def probe(self) -> list[float]:
        """Compute the probe, one prompt after the other, in a row that no request uses."""
        row, values = self.cache.spare_row(), list[float]()
        for prompt in probe_prompts(self._vocab_size):
            chunk = PrefillChunk(row.index, 0, len(prompt))
            batch = StepBatch(prompt.tolist(), [], [chunk], [len(prompt) - 1])
            values += greedy_logprobs(torch.as_tensor(self.decoder.step(self.model, batch)))
        return values

    def drop_weights(self) -> list[Output]:
        """Drop the weights, which proved to be wrong, and everything computed with them."""
        log.error("dropping weights %d: their probe does not match", self.policy_version)
        self.model, ended = None, self.abort(None)
        self.cache.forget_parked()
        return ended

    def _restart(self, policy_version: int) -> None:
        """Recompute all contexts: in exact mode, one context never mixes several versions."""
        # Decoding requests first: they came first, and keep their place in the queue.
        self.prefilling = [*self.decoding, *self.prefilling]
        self.decoding = []
        for request in self.prefilling:
            row = request.row
            assert row is not None
            # The last sampled token is not in the cache yet: it is the next step's input.
            if request.is_decoding:
                self.cache.tokens[row.index, row.length] = request.last_token
                request.restart(self.cache.tokens[row.index, : row.length + 1].copy())
            # Routes of the whole context change with the weights, so the client needs all of them.
            request.routes_from = 0
        self.cache.forget_all(policy_version)

    def abort(self, request_id: str | None) -> list[Output]:
        """Abort one request, or all if `request_id` is None."""
        requests = [*self.waiting, *self.prefilling, *self.decoding]
        chosen = [r for r in requests if request_id in (None, r.request_id)]
        self.metrics.num_aborted += len(chosen)
        return [(request, self._finish(request, StopReason.ABORTED)) for request in chosen]

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Run one step and return the chunks that are due.

        If a step fails, it is repeated for each of its requests alone, and a request that fails
        again is ended with the error. If many requests fail in a row, the engine itself is broken:
        see `fault`.
        """
        assert self.model is not None
        started = time.perf_counter()
        # Suspects run alone, so that the next failure names the request that causes it.
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
        self.metrics.busy_s += time.perf_counter() - started
        return outputs

    def _isolate(self, members: list[GenerationRequest], error: Exception) -> list[Output]:
        """Mark the members of a failed step as suspects; end a request that failed alone."""
        if len(members) == 1:
            log.error("request %s failed in a step alone: %r", members[0].request_id, error)
            self._count_failures(1, repr(error))
            return [(members[0], self._finish(members[0], StopReason.ABORTED, fault=error))]
        log.warning("step failed, retrying its %d requests one by one: %r", len(members), error)
        for request in members:
            row = request.row
            assert row is not None
            if request.is_decoding:
                length = request.num_prompt_tokens + request.num_sampled
                self.cache.tokens[row.index, length - 1] = request.last_token
                request.restart(self.cache.tokens[row.index, :length].copy())
            # At least one token must be computed again, to get the logits of the next one.
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
        """Assign rows to waiting requests in order, skipping those that are better deferred."""
        deferred: list[GenerationRequest] = []
        while self.waiting and self.num_running < self.options.num_running_max:
            request = self.waiting.popleft()
            if self._is_better_later(request):
                deferred.append(request)
                continue
            # Exact mode recomputes the context unless the session's row is fresh; then earlier
            # routes, which the client has from older weights, are replaced as well.
            if self._recomputes and not self.cache.holds(request.session_id):
                request.routes_from = 0
            row = self.cache.acquire(request.prompt, request.session_id)
            assert row is not None, "there are more rows than running requests"
            request.start(row)
            self.metrics.num_cached_tokens += row.length
            self.prefilling.append(request)
        self.waiting.extendleft(reversed(deferred))

    def _is_better_later(self, request: GenerationRequest) -> bool:
        """Return whether a prompt in prefill will share a longer prefix than the cache does now."""
        if not self.prefilling:
            return False
        _, cached = self.cache.match(request.prompt, request.session_id)
        coming = max(shared_prefix(other.prompt, request.prompt) for other in self.prefilling)
        return min(coming, len(request.prompt) - 1) - cached >= _SHARED_PREFIX_WORTH

    def _plan(
        self, members: Sequence[GenerationRequest]
    ) -> tuple[StepBatch, list[GenerationRequest]]:
        """Return the batch of the next step, and the requests for which it samples a token.

        Args:
            members: Requests to include: the decoding ones first, then those in prefill.

        """
        sampled = [request for request in members if request.is_decoding]
        positions = [self.cache.rows[i].length for i in range(len(sampled))]
        for request in sampled:
            request.draft = self._draft(request)
        token_ids = [i for request in sampled for i in (request.last_token, *request.draft)]
        outputs, chunks = list(range(len(token_ids))), []
        draft_lengths = [len(request.draft) for request in sampled]
        budget = self.options.prefill_tokens_max
        for request in members[len(sampled) :]:
            row = request.row
            assert row is not None
            num_tokens = min(budget, len(request.prompt) - row.length)
            # The budget is used up; the remaining requests continue in the next step.
            if num_tokens == 0:
                break
            budget -= num_tokens
            chunks.append(PrefillChunk(row.index, row.length, num_tokens))
            end = row.length + num_tokens
            token_ids += request.prompt[row.length : end].tolist()
            if end == len(request.prompt):
                outputs.append(len(token_ids) - 1)
                sampled.append(request)
        has_drafts = any(draft_lengths)
        drafts = draft_lengths if has_drafts else ()
        return StepBatch(token_ids, positions, chunks, outputs, drafts), sampled

    def _remember(self, request: GenerationRequest, row: CacheRow) -> None:
        """Let later drafts continue as this turn did."""
        if self.options.num_drafts_max:
            tokens, start = self.cache.tokens[row.index], request.num_prompt_tokens
            end = start + request.num_sampled
            tokens[end - 1] = request.last_token
            self._drafts.record(tokens[:end], start)

    def _draft(self, request: GenerationRequest) -> list[int]:
        """Propose tokens that may follow a decoding request's last one."""
        # Where C is not available, a token's bits depend on what is computed with it. And shaping
        # needs the tokens before, which are not drawn yet.
        if self.decoder.name != NativeDecoder.name or request.is_shaped:
            return []
        row, end = request.row, request.num_prompt_tokens + request.num_sampled
        assert row is not None
        left = min(
            self.options.num_tokens_max - end,
            request.sampling.num_tokens_max - request.num_sampled,
        )
        count = min(self.options.num_drafts_max, left - 1)
        if count < 1:
            return []
        context = self.cache.tokens[row.index, :end]
        context[-1] = request.last_token
        return self._drafts.propose(context, count, request.stop_ids)

    def _advance(self, batch: StepBatch) -> None:
        """Record that the tokens of the batch are in the cache now, but for those of drafts."""
        self.cache.tokens[batch.places()] = batch.token_ids
        for row in self.cache.rows[: len(batch.decode_positions)]:
            row.length += 1
        for chunk in batch.chunks:
            self.cache.rows[chunk.row].length += chunk.num_tokens
            self.metrics.num_prefill_tokens += chunk.num_tokens

    def _sample(self, requests: list[GenerationRequest], logits: Any) -> list[Output]:
        before = [request.num_sampled for request in requests]
        faults = draw(requests, logits, self.decoder.sample)
        self._count(requests, before)
        num_broken = sum(fault is NON_FINITE_LOGITS for fault in faults)
        # Any finite row proves that the engine works; a refusing grammar is no failure of it.
        if num_broken < len(requests):
            self._num_failures = 0
        self._count_failures(num_broken, str(NON_FINITE_LOGITS))
        outputs = [
            (request, self._finish(request, StopReason.ABORTED, fault=fault))
            for request, fault in zip(requests, faults, strict=True)
            if fault is not None
        ]
        for request, fault in zip(requests, faults, strict=True):
            if fault is None:
                outputs += self._after_token(request)
        return outputs

    def _count(self, requests: list[GenerationRequest], before: list[int]) -> None:
        """Count what each request got, and keep what its draft foresaw in the cache."""
        for request, num_before in zip(requests, before, strict=True):
            num_drawn = request.num_sampled - num_before
            self.metrics.num_generated_tokens += num_drawn
            if request.draft:
                assert request.row is not None
                num_accepted = max(0, num_drawn - 1)
                request.row.length += num_accepted
                self.metrics.num_drafted_tokens += len(request.draft)
                self.metrics.num_accepted_tokens += num_accepted
                request.draft = []

    def _after_token(self, request: GenerationRequest) -> list[Output]:
        """Finish a request after its last token, or return a chunk if one is due."""
        request.is_suspect = False
        reason = request.stop_reason(self.options.num_tokens_max)
        if reason is not None:
            return [(request, self._finish(request, reason))]
        if not request.is_decoding:
            self._promote(request)
        # The first token is sent at once: clients measure the time to it.
        if request.num_sampled == 1 or request.num_pending >= self.options.chunk_tokens:
            return [(request, request.flush(self.policy_version))]
        return []

    def _promote(self, request: GenerationRequest) -> None:
        assert request.row is not None
        request.is_decoding = True
        self.prefilling.remove(request)
        # Decoding rows are kept dense at the front, so that a step reads one contiguous block.
        self.cache.swap(request.row, len(self.decoding))
        self.decoding.append(request)
        if self.options.num_drafts_max:
            self._drafts.record(request.prompt, request.num_cached)

    def _finish(
        self,
        request: GenerationRequest,
        reason: StopReason,
        *,
        fault: Exception | None = None,
    ) -> TokenChunk:
        """Remove a request from its queue; its row stays cached unless the request failed."""
        row, routes, spans = request.row, None, []
        if row is None:
            self.waiting.remove(request)
        else:
            # The last token was sampled but not fed back, so it has no routes and no cache entry.
            routes = self.cache.routes[row.index, request.routes_from : row.length].numpy().copy()
            spans = row.version_spans(request.routes_from)
            if not request.is_decoding:
                self.prefilling.remove(request)
            else:
                self._remember(request, row)
                # The last decoding row fills the gap, so that decoding rows stay dense.
                last = self.decoding.pop()
                if last is not request:
                    assert last.row is not None
                    self.decoding[row.index] = last
                    self.cache.swap(row, last.row.index)
            # In exact mode the routes may have been recomputed, and no client has received them.
            if self._recomputes and reason is StopReason.ABORTED:
                row.session_id = ""
            # Whatever failed may have left wrong keys and values behind.
            if fault is not None:
                row.length, row.session_id = 0, ""
            self.cache.release(row)
        return request.flush(self.policy_version, reason, routes, spans, fault=fault)


def _decoder(config: PolicyConfig, cache: SlotCache, num_threads: int) -> NativeDecoder | Decoder:
    native = NativeDecoder.load(config, cache, num_threads)
    if config.numerics.is_exact and native is None:
        raise ExactModeError(
            "policy.numerics.mode: 'exact' also needs the compiled step in the generator, which"
            " could not be compiled here or does not fit the policy; use 'fast' or 'off'"
        )
    return native or Decoder(config, cache)
