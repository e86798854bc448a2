"""A request inside the torch engine: what was asked, and what came of it so far."""

import time
from collections.abc import Sequence

import numpy as np
import torch

from penstock.actors.generator.engine import InvalidRequestError, TokenChunk
from penstock.actors.generator.kv_cache import CacheRow
from penstock.actors.generator.masks import TurnGrammar
from penstock.actors.generator.sampler import uniforms_for
from penstock.actors.generator.shaper import Shaped, TurnShaper, top_tokens
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
