"""Verdicts of judges, and evaluations that aggregate them."""

from enum import StrEnum
from typing import ClassVar

import msgspec

from penstock.messages.base import Event, Stream
from penstock.messages.rollout import SandboxRecord
from penstock.messages.settings import (
    Finite,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    UnitInterval,
)
from penstock.messages.task import Purpose

LENGTH_PENALTY = "length_penalty"
"""Name of the reward component that depends only on a rollout's length."""


class Outcome(StrEnum):
    """Final outcome of a sample; the ledger counts each sample under exactly one."""

    SOLVED = "solved"
    FAILED = "failed"
    POLICY_ERROR = "policy_error"
    TIMEOUT = "timeout"
    INFRASTRUCTURE_ERROR = "infrastructure_error"
    JUDGE_ERROR = "judge_error"
    STALE = "stale"
    FILTERED = "filtered"
    CANCELLED = "cancelled"
    NOT_REPRODUCIBLE = "not_reproducible"
    """The trainer cannot compute the distribution that the sample was drawn from."""
    GREEDY = "greedy"
    """The sample was drawn at temperature 0, without exploration."""
    ERASED = "erased"
    """The user's content was erased and is unreadable."""
    CAPPED = "capped"
    """A live sample was replaced by newer ones, because too many of its user's were waiting."""
    WITHHELD = "withheld"
    """The tokens were too old when the group was complete; the reward still counts in the
    baseline."""

    @property
    def is_trained(self) -> bool:
        """Whether the sample is trained: the policy caused the outcome, and it is usable."""
        return self in {Outcome.SOLVED, Outcome.FAILED, Outcome.POLICY_ERROR, Outcome.TIMEOUT}

    @property
    def is_masked(self) -> bool:
        """Whether the policy did not cause the outcome: no reward, and no part in the baseline."""
        return self in {
            Outcome.INFRASTRUCTURE_ERROR,
            Outcome.JUDGE_ERROR,
            Outcome.CANCELLED,
            Outcome.NOT_REPRODUCIBLE,
            Outcome.GREEDY,
            Outcome.ERASED,
        }


class CheatKind(StrEnum):
    """Kind of cheating that an episode shows in its actions or files."""

    HIDDEN_TESTS = "hidden_tests"
    """Wrote to paths of the hidden tests."""
    INTERPRETER = "interpreter"
    """Left files that Python, a test runner or the shell runs automatically."""
    DELEGATION = "delegation"
    """The solution calls, or could call, a correct implementation present on the machine."""
    INTROSPECTION = "introspection"
    """The solution inspects its caller, ends the process or runs code at exit."""
    ORIGINAL = "original"
    """Read a correct implementation present on the machine."""
    HISTORY = "history"
    """Searched for commits outside the task's history."""
    EGRESS = "egress"
    """Tried to access a network."""
    CANARY = "canary"
    """Used the secret planted outside the working directory."""
    MACHINE = "machine"
    """Interfered with the guest agent, other processes or devices."""
    OPAQUE = "opaque"
    """Left files that the audit cannot read: bytecode, libraries, archives, malformed Python."""
    UNFIT = "unfit"
    """Left files that cannot be recreated for grading."""
    RESOURCES = "resources"
    """Tried to exhaust processes, memory or disk."""
    CONTRAST = "contrast"
    """Reported by a judge that compared the attempts of a group."""


class CheatFinding(msgspec.Struct, frozen=True, kw_only=True):
    """Sign of cheating in one call or file."""

    kind: CheatKind
    where: str
    """Location, e.g. `turn 3, call 0` or `file a.py`."""
    detail: str
    is_decisive: bool = False
    """Whether it turns a solved task into a policy error; otherwise it is only reported."""


class JudgeScore(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Score of one judge on one criterion; only the verifiable judge decides the outcome."""

    judge: str
    """Name of the judge, from `judge.judges` or `judge.auxiliary`."""
    version: str
    """Digest of rubric and settings, and the model or policy version that answered."""
    criterion: str = ""
    score: UnitInterval | None = None
    """Mean over the replies; None without replies, with the cause in `detail`."""
    repeats: NonNegativeInt = 0
    """Number of valid replies."""
    disagreement: UnitInterval = 0.0
    """Largest difference between two replies."""
    num_prompt_tokens: NonNegativeInt = 0
    """Prompt tokens of all calls, as counted by the service."""
    num_reply_tokens: NonNegativeInt = 0
    duration_ms: NonNegativeFloat = 0.0
    detail: str = ""


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths of an episode by kind, in tokens and counts: the terms of the length penalty."""

    thinking: NonNegativeInt = 0
    """Sampled tokens that belong neither to a call nor to the final message."""
    call: NonNegativeInt = 0
    output: NonNegativeInt = 0
    """Tokens returned by tools."""
    final: NonNegativeInt = 0
    num_calls: NonNegativeInt = 0
    num_turns: NonNegativeInt = 0


class StepGraded(Event, frozen=True, kw_only=True):
    """Judge -> itself after a restart: grade of one step of a multi-step task."""

    stream: ClassVar[Stream] = Stream.REWARDS
    keyed_by: ClassVar[tuple[str, ...]] = ("rollout_id", "step")
    rollout_id: str
    step: NonNegativeInt
    judge_version: str
    outcome: Outcome
    """Outcome, `SOLVED` or `FAILED`; any other ends the grading."""
    score: Finite | None = None
    """Score; this field and those below are as in `Verdict`."""
    num_tests_passed: int = 0
    num_tests: int = 0
    sandbox: SandboxRecord | None = None
    detail: str = ""
    findings: list[CheatFinding] = []


class Verdict(Event, frozen=True, kw_only=True):
    """Judge -> trainer, pacer, monitor: outcome and reward of a rollout."""

    stream: ClassVar[Stream] = Stream.REWARDS
    keyed_by: ClassVar[tuple[str, ...]] = ("rollout_id", "judge")
    rollout_id: str
    group_id: str
    group_index: int
    purpose: Purpose
    judge: str
    judge_version: str
    outcome: Outcome
    reward: Finite
    """Reward; meaningless if `outcome.is_masked`."""
    components: dict[str, Finite] = {}
    """Components that add up to `reward`, e.g. tests, length_penalty, judge.style."""
    score: UnitInterval | None = None
    """Verifier's own reward, if it gave partial credit."""
    scores: list[JudgeScore] = []
    """Scores of all other judges."""
    lengths: Lengths | None = None
    """Lengths of the episode; None if the way it ended decided the outcome."""
    num_tests_passed: int = 0
    num_tests: int = 0
    policy_version: int = 0
    """Oldest version that sampled a token of the rollout."""
    policy_version_max: int = -1
    """Newest version that sampled a token; -1 without tokens."""
    category: str = ""
    source: str = ""
    """Source of the task, as in `Task.source`."""
    sandbox: SandboxRecord | None = None
    duration_ms: float = 0.0
    detail: str = ""
    findings: list[CheatFinding] = []
    """Signs of cheating, whether decisive or not."""
    unseparated: bool = False
    """Whether the verifier runs as the same user as the code under test, which can then forge the
    reward."""

    @property
    def merit(self) -> float:
        """Reward without the length penalty, for comparing what rollouts achieved."""
        if not self.components:
            return self.reward
        return sum(value for name, value in self.components.items() if name != LENGTH_PENALTY)


def evaluation_id(policy_version: int, eval_set: str) -> str:
    """Return the id of the evaluation of a version on one evaluation set."""
    return f"v{policy_version}-{eval_set}" if eval_set else f"v{policy_version}"


class EvalAnnounced(Event, frozen=True, kw_only=True):
    """Evaluator -> receivers of replicas that serve evaluations: keep serving this version.

    The replicas keep it until its `EvalCompleted`. Of several announced evaluations, those of the
    lowest version run first, and among its sets the one announced first.
    """

    stream: ClassVar[Stream] = Stream.CONTROL
    keyed_by: ClassVar[tuple[str, ...]] = ("eval_id",)
    eval_id: str
    policy_version: int
    num_tasks: int
    eval_set: str = ""
    """Name of the evaluation set (`[[evaluator.sets]]`); empty for the run's only set."""
    is_main: bool = True
    """Whether stop rules, gates and headline numbers use this set."""
    num_samples: PositiveInt = 1
    """Number of attempts per task."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature; None for `pacer.eval_temperature`."""
    sources: list[str] = []
    """Sources of the held-out tasks to choose from; empty for all."""
    categories: list[str] = []
    """Categories of the held-out tasks to choose from; empty for all."""

    @property
    def num_attempts(self) -> int:
        """Number of attempts over all tasks."""
        return self.num_tasks * self.num_samples


class EvalRequested(EvalAnnounced, frozen=True, kw_only=True):
    """Evaluator -> pacer: start the attempts; a replica now serves the version."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Mean over tasks with its 95% interval."""

    value: Finite
    low: Finite
    high: Finite
    num_tasks: NonNegativeInt


class VersionComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Version of the policy against an earlier one, on the tasks that both attempted."""

    policy_version: int
    """Earlier version."""
    difference: Estimate
    """Difference of the pass rates, later minus earlier."""
    num_better: NonNegativeInt
    """Tasks of which the later version solved a larger share of its attempts."""
    num_worse: NonNegativeInt
    p_value: UnitInterval
    """Probability of a split at least as uneven if neither were better: the exact two-sided sign
    test, which for one attempt per task is McNemar's."""


class EvalCompleted(Event, frozen=True, kw_only=True):
    """Evaluator -> trainer (stop rule), monitor: results of an evaluation."""

    stream: ClassVar[Stream] = Stream.CONTROL
    keyed_by: ClassVar[tuple[str, ...]] = ("eval_id",)
    eval_id: str
    policy_version: int
    num_solved: int
    num_tasks: int
    """Number of counted attempts, `num_samples` per task; masked outcomes and rollouts with tokens
    of another version are left out."""
    num_masked: int = 0
    num_wrong_version: int = 0
    """Number of rollouts with tokens of a version other than the evaluated one."""
    pass_rate_by_category: dict[str, float] = {}
    pass_rate_by_source: dict[str, float] = {}
    eval_set: str = ""
    """Name of the set; this field and the two below are as in `EvalAnnounced`."""
    is_main: bool = True
    num_samples: PositiveInt = 1
    pass_at_k: dict[int, float] = {}
    """k -> unbiased estimate (arXiv 2107.03374) of the probability that one of k attempts solves a
    task, averaged over tasks with at least k counted attempts."""
    intervals: dict[int, tuple[Finite, Finite]] = {}
    """k -> 95% interval of that estimate."""
    comparison: VersionComparison | None = None
    """Comparison with the first version that was evaluated on the same set, if there is one."""
