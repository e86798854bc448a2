"""Generators: requests and streamed replies, the replicas that answer them, and their channels.

A channel says which policy version a replica serves: `newest`, `stable`, `candidate`, or one
version for good, `version:7`. `stable` and `candidate` are where the last `ChannelMoved` left
them; one that was never moved is the newest.
"""

from typing import ClassVar

from penstock.messages.base import Array, Event, Message, Stream
from penstock.messages.errors import ConfigError
from penstock.messages.rollout import StopReason
from penstock.messages.task import Purpose, Sampling

NEWEST = "newest"
MOVED_CHANNELS = ("stable", "candidate")
"""Channels that point where the log says."""
_PIN = "version:"


def pinned(policy_version: int) -> str:
    """Return the channel of one version."""
    return f"{_PIN}{policy_version}"


def pinned_version(channel: str) -> int | None:
    """Return the one version of a channel, or None if it may move.

    Raises:
        ConfigError: No such channel.

    """
    if channel == NEWEST or channel in MOVED_CHANNELS:
        return None
    number = channel.removeprefix(_PIN)
    if number == channel or not (number.isascii() and number.isdigit()):
        choices = ", ".join((NEWEST, *MOVED_CHANNELS))
        raise ConfigError(f"channel: expected {choices} or {_PIN}N, got {channel!r}")
    return int(number)


class Generate(Message, frozen=True, kw_only=True):
    """Rollout worker or gateway -> a replica that serves `purpose` on `channel`."""

    request_id: str
    session_id: str
    """Turns of one session share a KV prefix on one replica."""
    purpose: Purpose
    channel: str = NEWEST
    """`version:N` is answered by that version alone, or refused."""
    token_ids: Array
    """int32 [P]: the whole context."""
    sampling: Sampling
    num_resumed: int = 0
    """Of these, the last so many are the turn's own, sampled by another replica that went away."""
    routes_from: int = 0
    """Return routed experts from this position on."""
    deadline_s: float = 60.0
    is_suspect: bool = False
    """Whether it was in progress when a generator died: it is served while no other such is."""


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
    support: bytes = b""
    """Sealed (`kernels.support`): the tokens that could be drawn, where settings leave some out."""
    forced: list[tuple[int, int]] = []
    """Spans [start, end) of the N tokens that were the only one that the grammar allowed."""
    top_ids: Array | None = None
    """int32 [N, K], likeliest first, where `Sampling.num_top_logprobs` asks for K."""
    top_logprobs: Array | None = None
    """float32 [N, K]."""


class AbortGeneration(Message, frozen=True, kw_only=True):
    """Requester -> generators: stop sampling this request."""

    request_id: str


class ReplicaReported(Event, frozen=True, kw_only=True):
    """Generator -> rollout workers, gateway, pacer, evaluator, monitor.

    Once a second, and whenever its version changes; a replica that is silent is not counted.
    """

    stream: ClassVar[Stream] = Stream.METRICS
    region: str
    replica: str
    """Unique in the run: its region's name, or `<region>.<name>` where that has several."""
    started_at: float
    """Unix seconds; of two processes under one name, the later one counts."""
    serves: list[Purpose]
    """What it is asked for now; empty before it has weights, and when it leaves."""
    channel: str = NEWEST
    policy_version: int = -1
    num_requests: int = 0
    """Running and waiting."""
    num_running_max: int = 1
    is_leaving: bool = False
    queue_s: float = 0.0
    """Mean time that requests of the last minute waited before they were computed."""

    def key(self) -> str:
        """Name the replica; the latest wins."""
        return self.replica


class ChannelMoved(Event, frozen=True, kw_only=True):
    """Command line, gatekeeper -> receivers, relays, compactor: a channel points elsewhere."""

    stream: ClassVar[Stream] = Stream.CONTROL
    number: int
    """Moves of all channels before this one: two that move at once cannot both be the next."""
    channel: str
    policy_version: int
    channels: dict[str, int]
    """Where each channel that was ever moved points from now on."""
    candidate_number: int = -1
    """The candidate for which the gatekeeper moved it; -1: a person did, or nobody had yet."""

    def key(self) -> str:
        """One per move."""
        return str(self.number)
