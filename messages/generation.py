"""Requests to generators and their streamed replies, replicas, and channels.

A channel determines which policy version a replica serves: `newest`, `stable`, `candidate`, or a
fixed version such as `version:7`. The last `ChannelMoved` says where `stable` and `candidate`
point; until first moved, they point to the newest version.
"""

from typing import ClassVar

from penstock.messages.base import Array, Event, Message, Stream
from penstock.messages.errors import ConfigError
from penstock.messages.rollout import StopReason
from penstock.messages.task import Purpose, Sampling

NEWEST = "newest"
MOVED_CHANNELS = ("stable", "candidate")
"""Channels whose version is set by `ChannelMoved`."""
_PIN = "version:"


def pinned(policy_version: int) -> str:
    """Return the channel that always serves one version."""
    return f"{_PIN}{policy_version}"


def pinned_version(channel: str) -> int | None:
    """Return the version of a fixed channel, or None if the channel can move.

    Raises:
        ConfigError: There is no such channel.

    """
    if channel == NEWEST or channel in MOVED_CHANNELS:
        return None
    number = channel.removeprefix(_PIN)
    # `isdigit` alone accepts digits of other scripts.
    if number == channel or not (number.isascii() and number.isdigit()):
        choices = ", ".join((NEWEST, *MOVED_CHANNELS))
        raise ConfigError(f"channel: expected {choices} or {_PIN}N, got {channel!r}")
    return int(number)


class Generate(Message, frozen=True, kw_only=True):
    """Rollout worker or gateway -> replica that serves `purpose` on `channel`: sample a turn."""

    request_id: str
    session_id: str
    """Session id; turns of one session reuse a KV-cache prefix on one replica."""
    purpose: Purpose
    channel: str = NEWEST
    """Channel that must serve the request; any version other than N refuses `version:N`."""
    token_ids: Array
    """int32 [P]: full context."""
    sampling: Sampling
    num_resumed: int = 0
    """Number of tokens at the end of the context that another replica sampled for this turn before
    it went away."""
    routes_from: int = 0
    """First position for which to return routed experts."""
    deadline_s: float = 60.0
    is_suspect: bool = False
    """Whether the request was in progress when a generator died; a replica serves only one such
    request at a time, so that the cause of another death is known."""


class TokensSampled(Message, frozen=True, kw_only=True):
    """Generator -> requester: a chunk of the reply; the last one has a `stop_reason`."""

    request_id: str
    token_ids: Array
    """int32 [N]: sampled tokens."""
    behavior_logprobs: Array
    """float32 [N]: log probabilities of the tokens when they were sampled."""
    policy_version: int
    """Policy version that sampled the chunk; a chunk never spans two versions."""
    stop_reason: StopReason | None = None
    replica: str = ""
    queue_ms: float = 0.0
    route_segments: list[bytes] = []
    """Routed experts in sealed segments (`kernels/route_segments.py`), one per policy version, on
    the last chunk only. They cover positions up to total - 2, starting at `routes_from` or earlier
    if earlier positions were recomputed."""

    arithmetic: str = ""
    """Implementation of the decode step and number format of the experts, e.g. `native/mxfp8`."""
    support: bytes = b""
    """Tokens that could be drawn (sealed, `kernels.support`); empty if none were excluded."""
    forced: list[tuple[int, int]] = []
    """Spans [start, end) of tokens for which the grammar allowed no alternative."""
    top_ids: Array | None = None
    """int32 [N, K]: most likely tokens, best first; K is `Sampling.num_top_logprobs`."""
    top_logprobs: Array | None = None
    """float32 [N, K]: log probabilities of `top_ids`."""


class AbortGeneration(Message, frozen=True, kw_only=True):
    """Requester -> generators: stop sampling this request."""

    request_id: str


class ReplicaReported(Event, frozen=True, kw_only=True):
    """Generator -> rollout workers, gateway, pacer, evaluator, monitor: state of a replica.

    Sent once a second and whenever the version changes; silent replicas are not counted.
    """

    stream: ClassVar[Stream] = Stream.METRICS
    keyed_by: ClassVar[tuple[str, ...]] = ("replica",)
    region: str
    replica: str
    """Name that is unique in the run: the region's name, or `<region>.<name>` if it has several
    replicas."""
    started_at: float
    """Start time in Unix seconds; of two processes with one name, the one started later counts."""
    serves: list[Purpose]
    """Purposes served now; empty before the replica has weights and once it is leaving."""
    channel: str = NEWEST
    policy_version: int = -1
    num_requests: int = 0
    """Number of running and waiting requests."""
    num_running_max: int = 1
    is_leaving: bool = False
    queue_s: float = 0.0
    """Mean queueing time in seconds of the last minute's requests."""


class ChannelMoved(Event, frozen=True, kw_only=True):
    """Command line, gatekeeper -> receivers, relays, compactor: a channel now points elsewhere."""

    stream: ClassVar[Stream] = Stream.CONTROL
    keyed_by: ClassVar[tuple[str, ...]] = ("number",)
    number: int
    """Number of earlier moves of any channel; being the key, it makes concurrent moves conflict."""
    channel: str
    policy_version: int
    channels: dict[str, int]
    """Channel -> version from now on, for every channel that was ever moved."""
    candidate_number: int = -1
    """Candidate for which the gatekeeper moved the channel; -1 if a person did."""
