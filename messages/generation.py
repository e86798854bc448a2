"""Requests to generators: request and streamed replies, not kept on a stream."""

from penstock.messages.base import Array, Message
from penstock.messages.rollout import StopReason
from penstock.messages.task import Purpose, Sampling


class Generate(Message, frozen=True, kw_only=True):
    """Rollout worker or gateway -> a generator that serves `purpose`."""

    request_id: str
    session_id: str
    """Turns of one session share a KV prefix on one replica."""
    purpose: Purpose
    token_ids: Array
    """int32 [P]: the whole context."""
    sampling: Sampling
    routes_from: int = 0
    """Return routed experts from this position on."""
    deadline_s: float = 60.0


class TokensSampled(Message, frozen=True, kw_only=True):
    """Generator -> requester: a chunk of the reply; the last one has a stop_reason."""

    request_id: str
    token_ids: Array
    """int32 [N]."""
    behavior_logprobs: Array
    """float32 [N]."""
    policy_version: int
    """One chunk never spans two versions."""
    stop_reason: StopReason | None = None
    replica: str = ""
    queue_ms: float = 0.0
    route_segments: list[bytes] = []
    """On the last chunk, sealed (`kernels.routes`), one per policy version: up to position total-2,
    from routes_from or, where earlier positions were computed again, from before."""

    arithmetic: str = ""
    """Step and format of the experts, e.g. `native/mxfp8`."""


class AbortGeneration(Message, frozen=True, kw_only=True):
    """Requester -> generators: stop sampling this request."""

    request_id: str
