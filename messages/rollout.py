"""Turns and trajectories: what the policy saw and did, token by token."""

from collections import Counter
from collections.abc import Iterable
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
    """A turn that is no valid call nor a final answer, where the task's rules end on that; files
    that cannot be carried over; a machine or an engine that failed twice under the same turn."""
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


def tokens_by_version(spans: Iterable[VersionSpan]) -> dict[int, int]:
    """Return how many tokens each policy version drew, oldest version first."""
    total: Counter[int] = Counter()
    for span in spans:
        total[span.policy_version] += span.num_tokens
    return {version: total[version] for version in sorted(total) if total[version]}


class SandboxRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Which machine ran an episode or a test."""

    backend: str
    isolation_class: str
    kernel_digest: str
    image_digest: str
    boot_ms: float = 0.0


class EgressAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a program in a machine to reach a host outside through the proxy."""

    method: str
    """`CONNECT`, `GET`...; empty where the request was malformed."""
    target: str
    """`name:port`, or what was asked for instead of it."""
    is_allowed: bool
    reason: str = ""
    """Why it was denied, or ended before its time."""
    num_bytes_sent: int = 0
    num_bytes_received: int = 0
    num_attempts: int = 1
    """Attempts that this line stands for, bytes summed."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn: new context, then sampled tokens.

    Shapes: P new context tokens, N sampled tokens, L layers, K experts per token.
    """

    context_ids: Array
    """int32 [P]: prompt or observations that came since the last turn; loss-masked."""
    token_ids: Array
    """int32 [N], N >= 1: sampled."""
    behavior_logprobs: Array
    """float32 [N]: the sampler's own, after temperature."""
    version_spans: list[VersionSpan]
    """Sum of num_tokens is N."""
    stop_reason: StopReason
    calls: list[ToolCall] = []
    """Parsed from the sampled tokens; empty on a final answer or on a parse failure."""
    parse_error: str = ""
    """Why the sampled tokens are no valid turn; empty if they are."""
    route_segments: list[bytes] = []
    """Sealed (`kernels.routes`), one per policy version: positions up to, and without, this turn's
    last token. Where they begin before the previous turn's last token, the sampler computed those
    positions again, and they take the place of what was recorded."""

    arithmetic: str = ""
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
        """One per rollout and turn: a second sampling of the same turn is refused."""
        return f"{self.rollout_id}.{self.turn_index}"


class EpisodeSaved(Event, frozen=True, kw_only=True):
    """Rollout worker -> the worker that resumes or branches the episode: what a turn left.

    The machine is a checkpoint of its host. Should that be gone, the stored turns' calls are run
    again in a fresh machine.
    """

    stream: ClassVar[Stream] = Stream.TRAJECTORIES
    rollout_id: str
    group_id: str
    num_turns: int
    """Played in the machine."""
    checkpoint_id: str
    host: str
    observation_ids: Array
    """int32 [P]: the next turn's context."""
    num_calls: int
    num_invalid_calls: int
    tool_s: float
    elapsed_s: float
    """Seconds of the episode's own time."""
    egress: list[EgressAttempt] = []
    """What its programs had tried to reach by then: a copy of the machine begins a new record."""

    def key(self) -> str:
        """One per rollout and number of turns: the first that was saved."""
        return f"{self.rollout_id}.{self.num_turns}"


class Trunk(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rollout left another one."""

    rollout_id: str
    num_turns: int
    """Shared: sampled, counted and trained as the other one's."""


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
    category: str
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
    """What the episode's programs tried to reach, where the task allows hosts: in all of its
    machines, and of a branch before it left its trunk."""
    trunk: Trunk | None = None
    """Where a branch left its trunk; `turns` starts with the trunk's."""

    def key(self) -> str:
        """One per rollout."""
        return self.rollout_id

    @property
    def machine_id(self) -> str:
        """The rollout that its machine was set up for: a branch has a copy of its trunk's."""
        return self.trunk.rollout_id if self.trunk else self.rollout_id

    @property
    def num_trunk_turns(self) -> int:
        """How many of the first turns are another rollout's."""
        return self.trunk.num_turns if self.trunk else 0

    @property
    def own_turns(self) -> list[Turn]:
        """The turns that are this rollout's to count and to train.

        Of a branch, those since it left its trunk; the trunk is context of the first, whose
        routes cover it (`Generate.routes_from` was 0).
        """
        if self.trunk is None:
            return self.turns
        shared, own = self.turns[: self.num_trunk_turns], self.turns[self.num_trunk_turns :]
        past = [ids for turn in shared for ids in (turn.context_ids, turn.token_ids)]
        return [
            msgspec.structs.replace(turn, context_ids=_joined([*past, turn.context_ids]))
            if index == 0
            else turn
            for index, turn in enumerate(own)
        ]

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy drew, over all turns."""
        return sum(turn.token_ids.shape[0] for turn in self.turns)

    @property
    def min_policy_version(self) -> int:
        """The oldest version that drew a token; 0 when nothing was drawn."""
        spans = [span.policy_version for turn in self.turns for span in turn.version_spans]
        return min(spans, default=0)


def _joined(parts: list[Array]) -> Array:
    """Return several int32 arrays as one."""
    data = b"".join(part.data for part in parts)
    return Array(dtype="int32", shape=(len(data) // 4,), data=data)
