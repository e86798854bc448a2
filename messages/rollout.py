"""Turns and rollouts: tokens that the policy read and sampled, and files left by episodes."""

import math
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec

from penstock.messages.base import Array, Claim, Event, Part, Stream
from penstock.messages.settings import NonNegativeFloat, NonNegativeInt
from penstock.messages.task import FileState, Purpose, Sampling

EXTERNAL_VERSION = -1
"""Policy version recorded for tokens that no version of this run sampled."""


class StopReason(StrEnum):
    """Why sampling of a turn ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


class EpisodeEnd(StrEnum):
    """Why an episode ended, as the rollout worker sees it."""

    FINISHED = "finished"
    """The agent ended the episode with a turn without calls or with the `finish` tool."""
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"  # noqa: S105
    TIME_LIMIT = "time_limit"
    POLICY_ERROR = "policy_error"
    """A turn was neither a valid call nor a final answer and the task's rules do not allow that;
    files could not be copied; or a machine or an engine failed twice on the same turn."""
    INFRASTRUCTURE_ERROR = "infrastructure_error"
    CANCELLED = "cancelled"


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """Tool call made by the policy."""

    name: str
    arguments: dict[str, str]


class VersionSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive tokens sampled by one policy version."""

    policy_version: Annotated[int, msgspec.Meta(ge=EXTERNAL_VERSION)]
    num_tokens: NonNegativeInt


def tokens_by_version(spans: Iterable[VersionSpan]) -> dict[int, int]:
    """Return the number of tokens sampled by each policy version, oldest version first."""
    total: Counter[int] = Counter()
    for span in spans:
        total[span.policy_version] += span.num_tokens
    return {version: total[version] for version in sorted(total) if total[version]}


class SandboxRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Machine that ran an episode or a test."""

    backend: str
    isolation_class: str
    kernel_digest: str
    image_digest: str
    boot_ms: float = 0.0
    confinement: list[str] = []
    """Names of the measures that confined its host process (`envs.microvm.confinement.Measure`)."""


class EgressAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """Attempt of a program in a machine to reach an outside host through the proxy."""

    method: str
    """HTTP method, e.g. `CONNECT` or `GET`; empty if the request was malformed."""
    target: str
    """Requested target: `name:port`, or the text that was sent in its place."""
    is_allowed: bool
    reason: str = ""
    """Why the attempt was denied or cut short."""
    num_bytes_sent: int = 0
    num_bytes_received: int = 0
    num_attempts: int = 1
    """Number of equal attempts that this record stands for, with their bytes added up."""


class TurnSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token counts of a turn, without the tokens."""

    num_context: NonNegativeInt
    num_sampled: NonNegativeInt
    version_spans: list[VersionSpan]
    starts_segment: bool = False
    """Whether the turn starts a segment; this field and those below are as in `Turn`."""
    is_summary: bool = False
    is_withheld: bool = False


class StoredTurn(Claim, frozen=True, kw_only=True):
    """Claim on a turn in the store."""

    summary: TurnSummary


class Turn(Part, frozen=True, kw_only=True):
    """One turn of an episode: new context, then sampled tokens.

    Shapes: P new context tokens, N sampled tokens, L layers, K experts per token.
    """

    context_ids: Array
    """int32 [P]: prompt, or observations since the last turn; masked from the loss."""
    token_ids: Array
    """int32 [N], N >= 1: sampled tokens."""
    behavior_logprobs: Array
    """float32 [N]: log probabilities under the distribution that the sampler drew from."""
    version_spans: list[VersionSpan]
    """Policy versions that sampled the tokens; `num_tokens` add up to N."""
    stop_reason: StopReason
    calls: list[ToolCall] = []
    """Tool calls parsed from the sampled tokens; empty for a final answer or a parse error."""
    parse_error: str = ""
    """Why the sampled tokens are not a valid turn; empty if they are."""
    route_segments: list[bytes] = []
    """Routed experts in sealed segments (`kernels/route_segments.py`), one per policy version, for
    positions before this turn's last token. Segments that begin before the previous turn's last
    token replace the routes recorded earlier, because the sampler recomputed those positions."""
    arithmetic: str = ""
    """Sampler's decode step and number format of the experts, e.g. `native/mxfp8`; checked by the
    trainer."""
    sampling: Sampling | None = None
    """Sampling settings, without a grammar's text; None if unknown, which excludes the turn from
    training."""
    support: list[bytes] = []
    """Tokens that could be drawn at each position (sealed, `kernels.support`), if the settings
    exclude some."""
    forced: list[tuple[NonNegativeInt, NonNegativeInt]] = []
    """Spans [start, end) of tokens that count as context: those for which nothing else was allowed,
    and in an external session those between its turns."""
    starts_segment: bool = False
    """Whether the context is the full prompt of a new segment: nothing earlier was read, and
    positions and routes start at 0 again."""
    is_summary: bool = False
    """Whether the turn is a requested summary, with which the next segment begins."""
    is_withheld: bool = False
    """Whether the turn's tokens are only context: sampled and read, but not trained."""

    @property
    def summary(self) -> TurnSummary:
        """Token counts, for events that refer to the turn without holding it."""
        return TurnSummary(
            num_context=math.prod(self.context_ids.shape),
            num_sampled=math.prod(self.token_ids.shape),
            version_spans=self.version_spans,
            starts_segment=self.starts_segment,
            is_summary=self.is_summary,
            is_withheld=self.is_withheld,
        )

    def stored(self, claim: Claim) -> StoredTurn:
        """Return a claim that also holds the turn's summary."""
        return StoredTurn(
            object_key=claim.object_key,
            num_bytes=claim.num_bytes,
            blake3=claim.blake3,
            summary=self.summary,
        )


class TurnSampled(Event, frozen=True, kw_only=True):
    """Rollout worker -> trainer, judge, ledger, monitor: a turn, from which an episode can resume.

    This is the only copy of a turn; other events refer to it.
    """

    stream: ClassVar[Stream] = Stream.TRAJECTORIES
    keyed_by: ClassVar[tuple[str, ...]] = ("rollout_id", "turn_index")
    rollout_id: str
    group_id: str
    purpose: Purpose
    turn_index: NonNegativeInt
    turn: Turn | StoredTurn


class Trunk(msgspec.Struct, frozen=True, kw_only=True):
    """Rollout from which another one branched off, and where."""

    rollout_id: str
    num_turns: NonNegativeInt
    """Number of shared turns, which are counted and trained as part of the trunk's rollout."""


class EpisodeFiles(Part, frozen=True, kw_only=True):
    """Files that an episode left in its machine."""

    changed: dict[str, bytes] = {}
    """Changed and added files, path -> bytes, for grading in a fresh machine."""
    states: list[FileState] = []
    """What else changed: modes, links, folders, names that are no UTF-8."""


class RolloutFinished(Event, frozen=True, kw_only=True):
    """Rollout worker -> judges, trainer, pacer: a rollout ended; `turn_key` locates its turns."""

    stream: ClassVar[Stream] = Stream.TRAJECTORIES
    keyed_by: ClassVar[tuple[str, ...]] = ("rollout_id",)
    rollout_id: str
    group_id: str
    group_index: int
    group_size: int
    member: int
    purpose: Purpose
    task_id: str
    category: str
    source: str = ""
    """Source of the task, as in `Task.source`."""
    end: EpisodeEnd
    turns: list[TurnSummary]
    """Summaries of all turns; those of a branch start with its trunk's."""
    files: EpisodeFiles | Claim
    deleted: list[str] = []
    """Paths of deleted files."""
    sandbox: SandboxRecord | None = None
    num_calls: NonNegativeInt = 0
    num_invalid_calls: NonNegativeInt = 0
    wall_s: NonNegativeFloat = 0.0
    tool_s: NonNegativeFloat = 0.0
    error: str = ""
    egress: list[EgressAttempt] = []
    """Network attempts of programs in all its machines; a branch includes those of its trunk."""
    trunk: Trunk | None = None
    """Trunk that the rollout branched off; None if it is not a branch."""
    step_ends: list[NonNegativeInt] = []
    """For multi-step tasks, the turns that ended each step but the last one reached."""
    tool_names: list[list[str]] = []
    """For each turn, the tools whose calls were executed, in order."""
    call_s: list[list[NonNegativeFloat]] = []
    """For each executed turn, seconds from its storage to the end of each call."""
    reported_reward: float | None = None
    """Reward from 0 to 1 by the program outside of the run that played it; None if there is none,
    or a judge is to grade the files."""

    def turn_key(self, index: int) -> str:
        """Return the key of the `TurnSampled` that holds a turn."""
        # Turns are stored once, so a branch refers to its trunk's.
        if self.trunk is not None and index < self.trunk.num_turns:
            return f"{self.trunk.rollout_id}.{index}"
        return f"{self.rollout_id}.{index}"

    @property
    def machine_id(self) -> str:
        """Rollout for which the machine was set up; a branch runs in a copy of its trunk's."""
        return self.trunk.rollout_id if self.trunk else self.rollout_id

    @property
    def num_trunk_turns(self) -> int:
        """Number of leading turns that belong to the trunk."""
        return self.trunk.num_turns if self.trunk else 0

    @property
    def own_turns(self) -> list[TurnSummary]:
        """Turns that count and are trained as part of this rollout: those after its trunk."""
        return self.turns[self.num_trunk_turns :]

    @property
    def num_segments(self) -> int:
        """Number of consecutive contexts in which the turns were sampled."""
        return 1 + sum(turn.starts_segment for turn in self.turns)

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled over all turns."""
        return sum(turn.num_sampled for turn in self.turns)

    @property
    def min_policy_version(self) -> int:
        """Oldest version that sampled a token; 0 without tokens."""
        spans = [span.policy_version for turn in self.turns for span in turn.version_spans]
        return min(spans, default=0)

    @property
    def max_policy_version(self) -> int:
        """Newest version that sampled a token; -1 without tokens."""
        spans = [span.policy_version for turn in self.turns for span in turn.version_spans]
        return max(spans, default=-1)
