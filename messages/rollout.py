"""Turns and trajectories: what the policy saw and did, token by token."""

from enum import StrEnum
from typing import ClassVar

import msgspec

from penstock.messages.base import Array, Event, Stream
from penstock.messages.task import Purpose


class StopReason(StrEnum):
    """Why sampling of one turn ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


class EpisodeEnd(StrEnum):
    """Why an episode ended, before any judge saw it."""

    FINISHED = "finished"
    """The agent ended it by a turn without a call or by the `finish` tool."""
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"  # noqa: S105
    TIME_LIMIT = "time_limit"
    POLICY_ERROR = "policy_error"
    """A turn that is no valid call nor a final answer, where the task's rules end on that."""
    INFRASTRUCTURE_ERROR = "infrastructure_error"
    CANCELLED = "cancelled"


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call that the policy made."""

    name: str
    arguments: dict[str, str]


class VersionSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A run of tokens sampled under one policy version."""

    policy_version: int
    num_tokens: int


class SandboxRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Which machine ran an episode or a test."""

    backend: str
    isolation_class: str
    kernel_digest: str
    image_digest: str
    boot_ms: float = 0.0


class EgressAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One try of a program in a machine to reach a host outside, by way of the proxy."""

    method: str
    """`CONNECT`, `GET`...; empty where the request was malformed."""
    target: str
    """`name:port`, or what was asked for instead of it."""
    is_allowed: bool
    reason: str = ""
    """Why it was denied, or ended before its time."""
    num_bytes_sent: int = 0
    num_bytes_received: int = 0


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn: new context, then sampled tokens.

    Shapes: P new context tokens, N sampled tokens, L layers, K experts a token.
    """

    context_ids: Array
    """int32 [P]: prompt or observations that came since the last turn; loss-masked."""
    token_ids: Array
    """int32 [N], N >= 1: sampled."""
    behavior_logprobs: Array
    """float32 [N]: the sampler's own, after temperature."""
    routed_experts: Array
    """uint8 [R, L, K]: for the positions from the previous turn's last token (or 0) up to, and
    without, this turn's last token; over turns they concatenate to positions 0 .. total-2. Empty
    where `route_segments` has them."""
    version_spans: list[VersionSpan]
    """Sum of num_tokens is N."""
    stop_reason: StopReason
    calls: list[ToolCall] = []
    """Parsed from the sampled tokens; empty on a final answer or on a parse failure."""
    parse_error: str = ""
    """Why the sampled tokens are no valid turn; empty if they are."""
    route_segments: list[bytes] | msgspec.UnsetType = msgspec.UNSET
    """Sealed (`kernels.routes`), one a policy version: positions up to, and without, this turn's
    last token. Where they begin before the previous turn's last token, the sampler computed those
    positions anew, and they take the place of what was recorded."""

    arithmetic: str | msgspec.UnsetType = msgspec.UNSET
    """The sampler's step and the format of its experts, e.g. `native/mxfp8`: a trainer of another
    format refuses the turn."""


class TurnSampled(Event, frozen=True, kw_only=True):
    """Rollout worker -> ledger, monitor; and the journal from which an episode resumes."""

    stream: ClassVar[Stream] = Stream.TRAJECTORIES
    rollout_id: str
    group_id: str
    purpose: Purpose
    turn_index: int
    turn: Turn

    def key(self) -> str:
        """One a rollout and turn: a second sampling of the same turn is refused."""
        return f"{self.rollout_id}.{self.turn_index}"


class RolloutFinished(Event, frozen=True, kw_only=True):
    """Rollout worker -> judges, trainer, pacer. At most 512 KiB inline, else by claim check."""

    stream: ClassVar[Stream] = Stream.TRAJECTORIES
    rollout_id: str
    group_id: str
    group_index: int
    group_size: int
    member: int
    purpose: Purpose
    task_id: str
    rung: str
    end: EpisodeEnd
    turns: list[Turn]
    files: dict[str, bytes]
    """The episode's changed or added files, for grading in a fresh VM."""
    deleted: list[str] = []
    sandbox: SandboxRecord | None = None
    num_calls: int = 0
    num_invalid_calls: int = 0
    wall_s: float = 0.0
    tool_s: float = 0.0
    error: str = ""
    egress: list[EgressAttempt] = []
    """What the episode's programs tried to reach, where the task allows hosts."""

    def key(self) -> str:
        """One a rollout."""
        return self.rollout_id

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy drew, over all turns."""
        return sum(turn.token_ids.shape[0] for turn in self.turns)

    @property
    def min_policy_version(self) -> int:
        """The oldest version that drew a token; 0 when nothing was drawn."""
        spans = [span.policy_version for turn in self.turns for span in turn.version_spans]
        return min(spans, default=0)
