"""What a generator expects of an inference engine.

`tests/contract/check_engine.py` is the conformance suite: every engine passes it.
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
    """A request that no retry helps: the text names the field and what it must be."""


class ContextLengthError(InvalidRequestError):
    """A context that the engine cannot hold.

    Attributes:
        num_tokens: The context's.
        num_tokens_max: Longest context that leaves room for one sampled token.

    """

    def __init__(self, num_tokens: int, num_tokens_max: int) -> None:
        super().__init__(num_tokens, num_tokens_max)
        self.num_tokens = num_tokens
        self.num_tokens_max = num_tokens_max

    def __str__(self) -> str:
        return f"token_ids: {self.num_tokens} long, expected 1..{self.num_tokens_max}"


class RequestFailedError(PenstockError, RuntimeError):
    """Computing this one request failed, and the engine goes on: another attempt fails alike."""


class EngineNotReadyError(PenstockError, RuntimeError):
    """The engine holds no weights yet, or was stopped."""


class EngineDiedError(EngineNotReadyError):
    """The engine ended while it computed this request, which may be the cause."""


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request as they come; the last chunk has a stop_reason."""

    token_ids: np.ndarray
    """int32 [N], N >= 0; the stop token is among them."""
    behavior_logprobs: np.ndarray
    """float32 [N]: of the distribution that the sampler drew from (`actors/policy/shaping.py`);
    of the untempered distribution where the temperature is 0."""
    policy_version: int
    """Under which all N were sampled."""
    stop_reason: StopReason | None = None
    routed_experts: np.ndarray | None = None
    """uint8 (int16 above 256 experts) [R, L, K], K = 0 in a dense model, on the last chunk: of the
    input positions routes_from .. total-2. The logits that gave the token at position p come from
    position p-1."""
    routes_from: int = 0
    """What was asked for; 0 where earlier positions were computed again with other weights."""
    route_spans: tuple[VersionSpan, ...] = ()
    """The versions that computed the R positions."""
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed again."""
    queue_ms: float = 0.0
    """Wait before the first prefill."""
    error: str = ""
    """Why computing the request failed; it is aborted."""
    is_refused: bool = False
    """Whether that is the request's own doing: no attempt helps, and nobody is to blame."""
    support: np.ndarray | None = None
    """uint8 [N, row_bytes(V)] (`kernels.support`): the tokens that could be drawn, where
    `Sampling.is_truncated`."""
    is_forced: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, bool))
    """bool [N]: where the grammar allowed one token alone; empty without a shaped request."""
    top_ids: np.ndarray | None = None
    """int32 [N, K], likeliest first, where `Sampling.num_top_logprobs` is K."""
    top_logprobs: np.ndarray | None = None
    """float32 [N, K]."""


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the engine can serve."""

    ready: bool
    paused: bool
    policy_version: int
    """-1 before the first commit."""
    num_running: int
    num_waiting: int
    error: str = ""
    """Why the engine died, if it did."""


class EngineMetrics(msgspec.Struct, kw_only=True):
    """Counters since the start."""

    num_generated_tokens: int = 0
    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""
    num_aborted: int = 0
    busy_s: float = 0.0
    """Time spent in steps."""
    last_pause_ms: float = 0.0
    """How long the last commit kept steps from running."""
    processes_s: float = 0.0
    """Processor seconds of processes that the engine started and that run."""


class EngineCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What this engine can do."""

    name: str
    num_tokens_max: int
    """Longest context, prompt and sampled tokens together."""
    num_running_max: int
    num_waiting_max: int
    arithmetic: str
    """Step and format of the experts, e.g. `native/mxfp8`."""
    num_experts: int
    """Experts of each layer, on which the width of packed routes depends; 0 in a dense model, which
    has none."""
    cache_block: int = 1
    """Tokens of a block of the prefix cache: a prefix is reused up to its last whole block, a
    prompt up to the last whole block before its last token."""


class Engine(Protocol):
    """An inference engine under a generator. All methods belong to one event loop."""

    def generate(  # noqa: PLR0913 - what a request is
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

        The last `num_resumed` tokens are the turn's own: grammar, penalties, seed and forced tokens
        go on after them. Requests of one non-empty session reuse the cache of the session's earlier
        turns. Closing the iterator aborts the request.

        Raises:
            InvalidRequestError: an empty prompt, ids outside the vocabulary, a sampling value out
                of range, a grammar that does not compile within its limits or is too complex, or a
                request_id that is in flight.
            ContextLengthError: the prompt leaves no room for a token.
            RequestFailedError: this request cannot be computed; the others go on.
            QueueFullError: num_waiting_max requests wait already.
            EngineNotReadyError: no weights yet, or stopped.
            EngineDiedError: the engine ended under the request.

        """
        ...

    async def abort(self, request_id: str | None = None) -> None:
        """End one request, or all, with `StopReason.ABORTED`; unknown ids are passed over."""
        ...

    async def pause(self) -> None:
        """Stop sampling; returns between two steps. Requests in flight wait for `resume`."""
        ...

    async def resume(self) -> None:
        """Resume sampling."""
        ...

    async def begin_update(self) -> None:
        """Open an update on a copy of the weights, dropping one that was never committed."""
        ...

    async def apply(self, patches: Mapping[str, np.ndarray | Patch]) -> None:
        """Stage whole tensors (uint16 bfloat16 bits, in shape) or patches; names are HF's.

        Raises:
            InvalidRequestError: no update is open, or a name, shape or index does not fit.

        """
        ...

    async def commit(
        self, policy_version: int, root_digest: str | None = None, probe: Sequence[float] = ()
    ) -> float:
        """Swap the staged weights in between two steps; requests in flight keep their cache.

        Args:
            policy_version: of the staged weights.
            root_digest: of the staged weights, as their publisher announced it.
            probe: what the trainer computes with them (`actors/policy/probe.py`). An engine that
                computes anything else is not ready, ends what is in flight with
                EngineNotReadyError, and hands out no token until a commit has matched.

        Returns:
            Milliseconds during which no step could run.

        Raises:
            CorruptDataError: the staged weights' digest is not `root_digest`, and nothing changed;
                or the engine's probe is not `probe`.
            InvalidRequestError: no update is open.

        """
        ...

    def probe(self) -> list[float]:
        """Return what the engine computed for the probe's prompts at its last commit."""
        ...

    async def digest(self) -> str:
        """Return the root digest of the weights in use, as bfloat16 under HF's names."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes but those of requests in flight."""
        ...

    def health(self) -> EngineHealth:
        """Return whether the engine can serve; never blocks."""
        ...

    def metrics(self) -> EngineMetrics:
        """Return the counters; never blocks."""
        ...

    def capabilities(self) -> EngineCapabilities:
        """Return what this engine can do."""
        ...
