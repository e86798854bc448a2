"""The interface of an inference engine.

Every engine must pass the conformance suite `tests/contract/check_engine.py`.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from penstock.kernels.delta import Patch
from penstock.messages.errors import PenstockError
from penstock.messages.rollout import StopReason, VersionSpan
from penstock.messages.task import Sampling


class InvalidRequestError(PenstockError, ValueError):
    """An invalid request; the text names the field and what was expected. A retry cannot help."""


class ContextLengthError(InvalidRequestError):
    """A context that is empty or too long for the engine.

    Attributes:
        num_tokens: Length of the context in tokens.
        num_tokens_max: Longest context that leaves room for one sampled token.

    """

    def __init__(self, num_tokens: int, num_tokens_max: int) -> None:
        super().__init__(num_tokens, num_tokens_max)
        self.num_tokens = num_tokens
        self.num_tokens_max = num_tokens_max

    def __str__(self) -> str:
        return f"token_ids: got {self.num_tokens} tokens, expected 1..{self.num_tokens_max}"


class RequestFailedError(PenstockError, RuntimeError):
    """One request failed while the engine works; another attempt would fail in the same way."""


class EngineNotReadyError(PenstockError, RuntimeError):
    """The engine has no weights yet or was stopped."""


class EngineDiedError(EngineNotReadyError):
    """The engine died while it computed this request, which may be the cause."""


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True):
    """N consecutive tokens of one request, N >= 0; the last chunk has a stop reason."""

    token_ids: np.ndarray
    """Sampled token ids, int32 [N], including the stop token."""
    behavior_logprobs: np.ndarray
    """Log-probabilities of the tokens under the distribution that the sampler drew from
    (`actors/policy/shaping.py`), or the untempered distribution at temperature 0; float32 [N]."""
    policy_version: int
    """Version of the weights under which all N tokens were sampled."""
    stop_reason: StopReason | None = None
    """Why the request ended; None unless this is the last chunk."""
    routed_experts: np.ndarray | None = None
    """Experts of the input positions routes_from .. total-2, only on the last chunk: uint8 (int16
    above 256 experts) [R, L, K], K = 0 in a dense model. The logits that gave the token at
    position p come from position p-1."""
    routes_from: int = 0
    """First position of `routed_experts`: the requested one, or 0 if earlier positions were
    recomputed with other weights."""
    route_spans: tuple[VersionSpan, ...] = ()
    """Versions of the weights that computed the R positions."""
    num_cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache."""
    queue_ms: float = 0.0
    """Time from arrival to the first prefill, in milliseconds."""
    error: str = ""
    """Why the request failed and was aborted; empty if it did not fail."""
    is_refused: bool = False
    """Whether `error` is the fault of the request itself, so that no other attempt can succeed."""
    support: np.ndarray | None = None
    """Tokens that could be drawn at each position, if `Sampling.is_truncated`: uint8
    [N, row_bytes(V)] (`kernels.support`)."""
    is_forced: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, bool))
    """Whether the grammar allowed exactly one token at each position: bool [N]; empty if the
    request is not shaped."""
    top_ids: np.ndarray | None = None
    """Most likely token ids at each position, best first: int32 [N, K] if
    `Sampling.num_top_logprobs` is K."""
    top_logprobs: np.ndarray | None = None
    """Log-probabilities of `top_ids`: float32 [N, K]."""


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """State of an engine."""

    ready: bool
    """Whether the engine can serve requests."""
    paused: bool
    policy_version: int
    """Version of the weights in use; -1 before the first commit."""
    num_running: int
    num_waiting: int
    error: str = ""
    """Why the engine died; empty if it did not."""


class EngineMetrics(msgspec.Struct, kw_only=True):
    """Counters since the engine started."""

    num_generated_tokens: int = 0
    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache."""
    num_drafted_tokens: int = 0
    """Number of tokens that drafts proposed."""
    num_accepted_tokens: int = 0
    """Number of drafted tokens that were drawn as well."""
    num_aborted: int = 0
    busy_s: float = 0.0
    """Time spent in steps, in seconds."""
    last_pause_ms: float = 0.0
    """Time during which the last commit kept steps from running, in milliseconds."""
    processes_s: float = 0.0
    """CPU seconds of running processes that the engine started."""


class EngineCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and arithmetic of an engine."""

    name: str
    num_tokens_max: int
    """Longest context in tokens, prompt and sampled tokens together."""
    num_running_max: int
    num_waiting_max: int
    arithmetic: str
    """Implementation of the step and number format of the experts, e.g. `native/mxfp8`."""
    num_experts: int
    """Number of experts per layer, which decides the width of packed routes; 0 in a dense model."""
    cache_block: int = 1
    """Tokens per block of the prefix cache. Only whole blocks are reused, and never the block with
    the last prompt token."""


class Engine(Protocol):
    """An inference engine. All methods must be called from one event loop."""

    def generate(  # noqa: PLR0913 - parameters of a request
        self,
        token_ids: np.ndarray,
        sampling: Sampling,
        *,
        request_id: str,
        session_id: str = "",
        routes_from: int = 0,
        num_resumed: int = 0,
    ) -> AsyncIterator[TokenChunk]:
        """Sample a continuation of `token_ids` (int [P], P >= 1).

        The last `num_resumed` tokens already belong to the turn: grammar, penalties, seed and
        forced tokens continue after them. Requests with the same non-empty session id reuse the
        KV cache of the session's earlier turns. Closing the iterator aborts the request.

        Raises:
            InvalidRequestError: The prompt is empty, an id lies outside the vocabulary, a sampling
                setting is out of range, the grammar does not compile within its limits or is too
                complex, or the request_id is already in flight.
            ContextLengthError: The prompt leaves no room for a token.
            RequestFailedError: This request cannot be computed; the others continue.
            QueueFullError: num_waiting_max requests are already waiting.
            EngineNotReadyError: The engine has no weights yet or was stopped.
            EngineDiedError: The engine died while it computed the request.

        """
        ...

    async def abort(self, request_id: str | None = None) -> None:
        """End one request, or all, with `StopReason.ABORTED`; unknown ids are ignored."""
        ...

    async def pause(self) -> None:
        """Stop sampling after the current step; requests in flight wait for `resume`."""
        ...

    async def resume(self) -> None:
        """Resume sampling."""
        ...

    async def begin_update(self) -> None:
        """Open an update on a copy of the weights; an uncommitted earlier update is discarded."""
        ...

    async def apply(self, patches: Mapping[str, np.ndarray | Patch]) -> None:
        """Stage whole tensors (bfloat16 bits as uint16) or patches, by Hugging Face names.

        Raises:
            InvalidRequestError: No update is open, or a name, shape or index does not fit.

        """
        ...

    async def commit(
        self, policy_version: int, root_digest: str | None = None, probe: Sequence[float] = ()
    ) -> float:
        """Swap in the staged weights between two steps; requests in flight keep their KV cache.

        Args:
            policy_version: Version of the staged weights.
            root_digest: Root digest that the publisher announced; None skips the check.
            probe: Probe values that the trainer computed (`actors/policy/probe.py`). If the
                engine's values differ, it becomes not ready, ends all requests with
                EngineNotReadyError, and returns no tokens until a later commit matches.

        Returns:
            Time during which no step could run, in milliseconds.

        Raises:
            CorruptDataError: The digest of the staged weights is not `root_digest`, and nothing
                changed; or the engine's probe values differ from `probe`.
            InvalidRequestError: No update is open.

        """
        ...

    def probe(self) -> list[float]:
        """Return the probe values that the engine computed at its last commit."""
        ...

    async def digest(self) -> str:
        """Return the root digest of the weights in use, in bfloat16 with Hugging Face names."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes except those of requests in flight."""
        ...

    def health(self) -> EngineHealth:
        """Return the state of the engine; never blocks."""
        ...

    def metrics(self) -> EngineMetrics:
        """Return the counters; never blocks."""
        ...

    def capabilities(self) -> EngineCapabilities:
        """Return the limits and the arithmetic of this engine."""
        ...
