"""Turns and trajectories: what the policy saw and did, token by token."""

import math
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec

from penstock.messages.base import Array, Claim, Event, Part, Stream
from penstock.messages.settings import NonNegativeFloat, NonNegativeInt
from penstock.messages.task import Purpose, Sampling

EXTERNAL_VERSION = -1  # Of an external session's tokens, which no version of this run sampled.


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

    policy_version: Annotated[int, msgspec.Meta(ge=EXTERNAL_VERSION)]
    num_tokens: NonNegativeInt


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
    confinement: list[str] = []
    """What held its host process back: names of `envs.microvm.confinement.Measure`."""


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


class TurnSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A turn without its tokens: enough to count them."""

    num_context: NonNegativeInt
    num_sampled: NonNegativeInt
    version_spans: list[VersionSpan]
    starts_segment: bool = False
    """As `Turn` says, like the two below."""
    is_summary: bool = False
    is_withheld: bool = False


class StoredTurn(Claim, frozen=True, kw_only=True):
    """A turn that lies in the store."""

    summary: TurnSummary


class Turn(Part, frozen=True, kw_only=True):
    """One turn: new context, then sampled tokens.

    Shapes: P new context tokens, N sampled tokens, L layers, K experts per token.
    """

    context_ids: Array
    """int32 [P]: prompt or observations that came since the last turn; loss-masked."""
    token_ids: Array
    """int32 [N], N >= 1: sampled."""
    behavior_logprobs: Array
    """float32 [N]: of the distribution that the sampler drew from."""
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
    """The sampler's step and format of the experts, e.g. `native/mxfp8`; checked by the trainer."""
    sampling: Sampling | None = None
    """What shaped the distribution, without a grammar's text. None: unknown, and not trained."""
    support: list[bytes] = []
    """Sealed (`kernels.support`): the tokens that could be drawn at each position, where the
    settings leave some out."""
    forced: list[tuple[NonNegativeInt, NonNegativeInt]] = []
    """Spans [start, end) that are context: of tokens that were the only one allowed; of an external
    session, what came between its turns."""
    starts_segment: bool = False
    """Whether its context is the whole prompt of a new segment: nothing before it was read, and
    positions and routes begin at 0 again."""
    is_summary: bool = False
    """Whether it was asked for a summary, with which the next segment begins."""
    is_withheld: bool = False
    """Whether its tokens are context alone: sampled and read, and not trained."""

    @property
    def summary(self) -> TurnSummary:
        """What is said of it where it is only named."""
        return TurnSummary(
            num_context=math.prod(self.context_ids.shape),
            num_sampled=math.prod(self.token_ids.shape),
            version_spans=self.version_spans,
            starts_segment=self.starts_segment,
            is_summary=self.is_summary,
            is_withheld=self.is_withheld,
        )

    def stored(self, claim: Claim) -> StoredTurn:
        """Return its claim, with its summary."""
        return StoredTurn(
            object_key=claim.object_key,
            num_bytes=claim.num_bytes,
            blake3=claim.blake3,
            summary=self.summary,
        )


class TurnSampled(Event, frozen=True, kw_only=True):
    """Rollout worker -> trainer, judge, ledger, monitor; and the journal an episode resumes from.

    The only copy of a turn: every other event names it.
    """

    stream: ClassVar[Stream] = Stream.TRAJECTORIES
    rollout_id: str
    group_id: str
    purpose: Purpose
    turn_index: NonNegativeInt
    turn: Turn | StoredTurn

    def key(self) -> str:
        """One per rollout and turn: a second sampling of the same turn is refused."""
        return f"{self.rollout_id}.{self.turn_index}"


class Trunk(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rollout left another one."""

    rollout_id: str
    num_turns: NonNegativeInt
    """Shared: sampled, counted and trained as the other one's."""


class EpisodeFiles(Part, frozen=True, kw_only=True):
    """What an episode left in its machine."""

    changed: dict[str, bytes] = {}
    """Path -> bytes of each changed or added file, for grading in a fresh VM."""


class RolloutFinished(Event, frozen=True, kw_only=True):
    """Rollout worker -> judges, trainer, pacer. Names its turns: `turn_key` says which."""

    stream: ClassVar[Stream] = Stream.TRAJECTORIES
    rollout_id: str
    group_id: str
    group_index: int
    group_size: int
    member: int
    purpose: Purpose
    task_id: str
    category: str
    source: str = ""
    """Of the task, as `Task.source`."""
    end: EpisodeEnd
    turns: list[TurnSummary]
    """Of all its turns; those of a branch start with its trunk's."""
    files: EpisodeFiles | Claim
    deleted: list[str] = []
    sandbox: SandboxRecord | None = None
    num_calls: NonNegativeInt = 0
    num_invalid_calls: NonNegativeInt = 0
    wall_s: NonNegativeFloat = 0.0
    tool_s: NonNegativeFloat = 0.0
    error: str = ""
    egress: list[EgressAttempt] = []
    """What its programs tried to reach, in all its machines; of a branch, in its trunk's too."""
    trunk: Trunk | None = None
    """Where a branch left its trunk."""
    step_ends: list[NonNegativeInt] = []
    """Of a task of several steps: the turns that ended each but the one it ended in."""
    tool_names: list[list[str]] = []
    """Per turn the tools that it called, in order, as far as calls are carried out."""
    call_s: list[list[NonNegativeFloat]] = []
    """Per turn played, the seconds that each call took; all start when the turn is stored."""

    def key(self) -> str:
        """One per rollout."""
        return self.rollout_id

    def turn_key(self, index: int) -> str:
        """Return the key of the `TurnSampled` that holds a turn."""
        if self.trunk is not None and index < self.trunk.num_turns:
            return f"{self.trunk.rollout_id}.{index}"
        return f"{self.rollout_id}.{index}"

    @property
    def machine_id(self) -> str:
        """The rollout that its machine was set up for: a branch has a copy of its trunk's."""
        return self.trunk.rollout_id if self.trunk else self.rollout_id

    @property
    def num_trunk_turns(self) -> int:
        """How many of the first turns are another rollout's."""
        return self.trunk.num_turns if self.trunk else 0

    @property
    def own_turns(self) -> list[TurnSummary]:
        """The turns that are this rollout's to count and to train: those since its trunk."""
        return self.turns[self.num_trunk_turns :]

    @property
    def num_segments(self) -> int:
        """Contexts that its turns were sampled in, one after the other."""
        return 1 + sum(turn.starts_segment for turn in self.turns)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy drew, over all turns."""
        return sum(turn.num_sampled for turn in self.turns)

    @property
    def min_policy_version(self) -> int:
        """The oldest version that drew a token; 0 when nothing was drawn."""
        spans = [span.policy_version for turn in self.turns for span in turn.version_spans]
        return min(spans, default=0)

    @property
    def max_policy_version(self) -> int:
        """The newest version that drew a token; -1 when nothing was drawn."""
        spans = [span.policy_version for turn in self.turns for span in turn.version_spans]
        return max(spans, default=-1)
