"""Requests in the torch engine: their tokens so far, and the draw of their next ones."""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch

from penstock.actors.generator.engine import InvalidRequestError, RequestFailedError, TokenChunk
from penstock.actors.generator.kv_cache import CacheRow
from penstock.actors.generator.sampler import (
    PositionSupport,
    SamplingBatch,
    TurnGrammar,
    TurnShaper,
    finite_rows,
    top_tokens,
    uniforms_for,
)
from penstock.messages.errors import PenstockError
from penstock.messages.rollout import StopReason, VersionSpan
from penstock.messages.task import Sampling


class GenerationRequest:
    """A request and the tokens sampled for it so far.

    Once added, it belongs to the engine's worker thread.
    """

    def __init__(  # noqa: PLR0913 - parameters of a request
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
        """Whether its whole prompt has been computed."""
        self.is_suspect = False
        """Whether it was part of a failed step and has not completed a step alone since."""
        self.last_token = -1
        self.draft: list[int] = []
        """Tokens that the step in progress verifies after `last_token`."""
        self.row: CacheRow | None = None
        self._created = time.perf_counter()
        self._queue_ms = 0.0
        self.num_cached = 0
        """Prompt tokens that needed no prefill."""
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._shaped: list[PositionSupport] = []
        self._top: list[tuple[np.ndarray, np.ndarray]] = []
        self._next: PositionSupport | None = None
        """Support of the token that is about to be drawn."""
        self._next_top: tuple[np.ndarray, np.ndarray] | None = None

    def start(self, row: CacheRow) -> None:
        """Assign a cache row, whose first `length` tokens need no prefill."""
        self.row = row
        self.num_cached = row.length
        self._queue_ms = (time.perf_counter() - self._created) * 1e3

    def begin(self, vocab_size: int) -> None:
        """Advance grammar and penalties over the tokens that the turn already has.

        Raises:
            InvalidRequestError: The grammar does not allow these tokens.

        """
        if self.shaper is not None:
            self.shaper.begin(self.prompt, vocab_size, self.num_resumed)

    @property
    def is_shaped(self) -> bool:
        """Whether `shape` has anything to do."""
        return self.shaper is not None or self.sampling.num_top_logprobs > 0

    def shape(self, logits: torch.Tensor) -> None:
        """Shape the logits [V] of the next token, in place.

        Raises:
            InvalidRequestError: The grammar became too complex or allows no token.

        """
        if self.shaper is not None:
            self._next = self.shaper.shape(logits)
        if self.sampling.num_top_logprobs:
            count = self.sampling.num_top_logprobs
            self._next_top = top_tokens(logits, self.sampling.temperature, count)

    def push(self, token_id: int, logprob: float) -> None:
        """Append one sampled token.

        Raises:
            InvalidRequestError: The grammar has become too complex.

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
        """Return why the last token ended the request, or None if it did not."""
        if self.last_token in self.stop_ids:
            return StopReason.STOP
        full = self.num_prompt_tokens + self.num_sampled >= num_tokens_max
        if full or self.num_sampled >= self.sampling.num_tokens_max:
            return StopReason.LENGTH
        return None

    def restart(self, context: np.ndarray) -> None:
        """Continue as a request whose prompt is everything computed and sampled so far."""
        self.prompt = context
        self.is_decoding, self.draft = False, []

    @property
    def num_pending(self) -> int:
        """Number of sampled tokens that have not been sent in a chunk yet."""
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
        """Return the pending tokens as a chunk and clear them."""
        supports = [shaped.support for shaped in self._shaped if shaped.support is not None]
        ids, logprobs = zip(*self._top, strict=True) if self._top else ((), ())
        chunk = TokenChunk(
            token_ids=np.array(self._token_ids, dtype=np.int32),
            behavior_logprobs=np.array(self._logprobs, dtype=np.float32),
            policy_version=policy_version,
            stop_reason=stop_reason,
            support=np.stack(supports) if supports else None,
            is_forced=np.array([shaped.is_forced for shaped in self._shaped], dtype=bool),
            top_ids=np.stack(ids) if ids else None,
            top_logprobs=np.stack(logprobs) if logprobs else None,
            routed_experts=routed_experts,
            routes_from=self.routes_from,
            route_spans=tuple(route_spans),
            num_cached_tokens=self.num_cached,
            queue_ms=self._queue_ms,
            error=_error_text(fault),
            is_refused=isinstance(fault, InvalidRequestError),
        )
        self._token_ids, self._logprobs = [], []
        self._shaped, self._top = [], []
        return chunk


def _error_text(fault: Exception | None) -> str:
    if fault is None:
        return ""
    # Our own errors are written for clients; others need their type to make sense.
    return str(fault) if isinstance(fault, PenstockError) else repr(fault)


NON_FINITE_LOGITS = RequestFailedError("the logits for the request's context are not finite")
"""Fault of a request whose logits contain NaN or infinity."""
Logits = np.ndarray | torch.Tensor
Sample = Callable[[Logits, SamplingBatch], tuple[list[int], list[float]]]


def draw(
    requests: Sequence[GenerationRequest], logits: Logits, sample: Sample
) -> list[Exception | None]:
    """Sample the next token of each request, and those after it that its draft foresaw.

    Args:
        requests: M requests, none of them both shaped and drafted for.
        logits: Logits float32 [N, V] after each request's last token and after each token of its
            draft, in this order; overwritten.
        sample: Sampling function of the decoder.

    Returns:
        Per request, why it gets no more tokens: `NON_FINITE_LOGITS`, or an `InvalidRequestError`
        from its grammar; None if it goes on.

    """
    faults: list[Exception | None] = [None] * len(requests)
    counts = [1 + len(request.draft) for request in requests]
    starts = list(accumulate(counts, initial=0))
    is_finite = finite_rows(logits)
    # Zeros in their place keep the batch valid; the tokens drawn from these rows are dropped below.
    if not is_finite.all():
        logits[~is_finite] = 0.0
    for index, (request, start) in enumerate(zip(requests, starts, strict=False)):
        if is_finite[start] and request.is_shaped:
            faults[index] = _try_shape(request, logits[start])
    pairs = list(zip(requests, counts, strict=True))
    batch = SamplingBatch(
        temperatures=[each.sampling.temperature for each, count in pairs for _ in range(count)],
        # By position in the turn, so that neither the batch, a retry nor a draft changes a draw.
        uniforms=[
            uniform
            for each, count in pairs
            for uniform in each.uniforms[each.num_sampled : each.num_sampled + count]
        ],
    )
    token_ids, logprobs = sample(logits, batch)
    drawn = list(zip(token_ids, logprobs, is_finite.tolist(), strict=True))
    for index, (request, count) in enumerate(pairs):
        if faults[index] is None:
            faults[index] = _push_run(request, drawn[starts[index] : starts[index] + count])
    return faults


def _push_run(
    request: GenerationRequest, drawn: Sequence[tuple[int, float, bool]]
) -> Exception | None:
    """Push draws (token id, logprob, are its logits finite?) up to one that the draft lacks."""
    for (token_id, logprob, is_valid), expected in zip(drawn, [*request.draft, None], strict=True):
        fault = _try_push(request, token_id, logprob) if is_valid else NON_FINITE_LOGITS
        if fault is not None:
            return fault
        # Later positions were computed after a token that was not drawn.
        if token_id != expected:
            break
    return None


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
