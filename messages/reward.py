"""Verdicts of judges, and the evaluation rounds that sum them up."""

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
"""The reward component that says how long a rollout took, and nothing of what it did."""


class Outcome(StrEnum):
    """The one accounted end of every sample."""

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
    """The trainer cannot compute the distribution that it was drawn from."""
    GREEDY = "greedy"
    """Drawn at temperature 0: nothing was explored."""
    ERASED = "erased"
    """Its user's content was erased: nobody can read it."""
    CAPPED = "capped"
    """A user's sample that gave way to newer ones: this user had too many waiting."""
    WITHHELD = "withheld"
    """Its tokens were too old when its group was complete; its reward counts in the baseline."""

    @property
    def is_trained(self) -> bool:
        """The policy's own doing, and neither too old nor without a gradient."""
        return self in {Outcome.SOLVED, Outcome.FAILED, Outcome.POLICY_ERROR, Outcome.TIMEOUT}

    @property
    def is_masked(self) -> bool:
        """Not the policy's own doing: no reward, no part in the group's baseline."""
        return self in {
            Outcome.INFRASTRUCTURE_ERROR,
            Outcome.JUDGE_ERROR,
            Outcome.CANCELLED,
            Outcome.NOT_REPRODUCIBLE,
            Outcome.GREEDY,
            Outcome.ERASED,
        }


class CheatKind(StrEnum):
    """What an episode did, or left behind, that is not solving its task."""

    HIDDEN_TESTS = "hidden_tests"
    """Wrote where hidden tests lie."""
    INTERPRETER = "interpreter"
    """Left what Python, a test runner or the shell would run by itself."""
    DELEGATION = "delegation"
    """The solution calls the machine's own right copy, or could."""
    INTROSPECTION = "introspection"
    """The solution looks at its caller, ends the process or runs code at exit."""
    ORIGINAL = "original"
    """Looked at the machine's own right copy."""
    HISTORY = "history"
    """Looked for commits that are not the task's."""
    EGRESS = "egress"
    """Tried to reach a network."""
    CANARY = "canary"
    """Used the secret that is planted outside the working directory."""
    MACHINE = "machine"
    """Meddled with the guest agent, other processes or devices."""
    OPAQUE = "opaque"
    """Left what no audit can read: bytecode, libraries, archives, Python that does not parse."""
    UNFIT = "unfit"
    """Left files that cannot be laid out again to be graded."""
    RESOURCES = "resources"
    """Tried to use up processes, memory or disk."""
    CONTRAST = "contrast"
    """Named by a judge that saw the attempts of its group side by side."""


class CheatFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One sign of a cheat."""

    kind: CheatKind
    where: str
    """`turn 3, call 0` or `file a.py`."""
    detail: str
    is_decisive: bool = False
    """A solved task with it counts as the policy's fault; else it is only reported."""


class JudgeScore(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one judge says of one criterion; no judge decides the outcome but the verifiable one."""

    judge: str
    """A name of `judge.judges`, or of `judge.auxiliary`."""
    version: str
    """Digest of its rubric and settings, and who answered: a model, or a policy version."""
    criterion: str = ""
    score: UnitInterval | None = None
    """Mean over the replies; None where there was none, with the cause in `detail`."""
    repeats: NonNegativeInt = 0
    """Replies that count."""
    disagreement: UnitInterval = 0.0
    """Largest difference between two of them."""
    num_prompt_tokens: NonNegativeInt = 0
    """Over all calls, as the service counts them."""
    num_reply_tokens: NonNegativeInt = 0
    duration_ms: NonNegativeFloat = 0.0
    detail: str = ""


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """What an episode spent, by kind, in tokens and counts: the length penalty's terms."""

    thinking: NonNegativeInt = 0
    """Tokens drawn that are neither of a call nor of the final message."""
    call: NonNegativeInt = 0
    output: NonNegativeInt = 0
    """Tokens that tools returned."""
    final: NonNegativeInt = 0
    num_calls: NonNegativeInt = 0
    num_turns: NonNegativeInt = 0


class StepGraded(Event, frozen=True, kw_only=True):
    """Judge -> itself after a restart: what one step of a rollout's task is worth."""

    stream: ClassVar[Stream] = Stream.REWARDS
    rollout_id: str
    step: NonNegativeInt
    judge_version: str
    outcome: Outcome
    """`SOLVED` or `FAILED`: other outcomes end the grading."""
    score: Finite | None = None
    """As in `Verdict`, like all below."""
    num_tests_passed: int = 0
    num_tests: int = 0
    sandbox: SandboxRecord | None = None
    detail: str = ""
    findings: list[CheatFinding] = []

    def key(self) -> str:
        """One per rollout and step."""
        return f"{self.rollout_id}.{self.step}"


class Verdict(Event, frozen=True, kw_only=True):
    """Judge -> trainer, pacer, monitor."""

    stream: ClassVar[Stream] = Stream.REWARDS
    rollout_id: str
    group_id: str
    group_index: int
    purpose: Purpose
    judge: str
    judge_version: str
    outcome: Outcome
    reward: Finite
    """Meaningless where `outcome.is_masked`."""
    components: dict[str, Finite] = {}
    """e.g. tests, length_penalty, judge.style; they sum to `reward`."""
    score: UnitInterval | None = None
    """The verifier's own reward, where it gave a part of a whole one."""
    scores: list[JudgeScore] = []
    """Of all other judges."""
    lengths: Lengths | None = None
    """None where the episode's end decided."""
    num_tests_passed: int = 0
    num_tests: int = 0
    policy_version: int = 0
    """Oldest version that drew a token of the rollout."""
    policy_version_max: int = -1
    """Newest version that did; -1 if there is no token."""
    category: str = ""
    source: str = ""
    """Of the task, as `Task.source`."""
    sandbox: SandboxRecord | None = None
    duration_ms: float = 0.0
    detail: str = ""
    findings: list[CheatFinding] = []
    """Signs of cheating, decisive or not."""
    unseparated: bool = False
    """The task's verifier shares its user with the code under test, which can forge the reward."""

    def key(self) -> str:
        """One per rollout and judge."""
        return f"{self.rollout_id}.{self.judge}"

    @property
    def merit(self) -> float:
        """The reward without its length penalty: rollouts of equal merit did equally well."""
        if not self.components:
            return self.reward
        return sum(value for name, value in self.components.items() if name != LENGTH_PENALTY)


def evaluation_id(policy_version: int, eval_set: str) -> str:
    """Return the id of a run's evaluation of a version on one of its sets."""
    return f"v{policy_version}-{eval_set}" if eval_set else f"v{policy_version}"


class EvalAnnounced(Event, frozen=True, kw_only=True):
    """Evaluator -> receivers of replicas that serve evaluations: hold this version.

    Until its `EvalCompleted`; of several, the lowest version comes first, and of one version's
    sets the one that was announced first.
    """

    stream: ClassVar[Stream] = Stream.CONTROL
    eval_id: str
    policy_version: int
    num_tasks: int
    eval_set: str = ""
    """Name of the evaluation set (`[[evaluator.sets]]`); empty: the run's only one."""
    is_main: bool = True
    """Whether stop rules, gates and headlines go by this set."""
    num_samples: PositiveInt = 1
    """Attempts of each task."""
    temperature: NonNegativeFloat | None = None
    """None: `pacer.eval_temperature`."""
    sources: list[str] = []
    """Of the held-out tasks to choose from; empty: all."""
    categories: list[str] = []
    """As `sources`."""

    def key(self) -> str:
        """One per evaluation."""
        return self.eval_id

    @property
    def num_attempts(self) -> int:
        """All attempts of all tasks."""
        return self.num_tasks * self.num_samples


class EvalRequested(EvalAnnounced, frozen=True, kw_only=True):
    """Evaluator -> pacer: attempt the held-out tasks; a replica serves the version."""


class EvalCompleted(Event, frozen=True, kw_only=True):
    """Evaluator -> trainer (stop rule), monitor."""

    stream: ClassVar[Stream] = Stream.CONTROL
    eval_id: str
    policy_version: int
    num_solved: int
    num_tasks: int
    """Counted attempts, one of each task unless `num_samples` is more; masked outcomes and those of
    a wrong version are left out."""
    num_masked: int = 0
    num_wrong_version: int = 0
    """Verdicts on rollouts with a token of another version than the evaluated one."""
    pass_rate_by_category: dict[str, float] = {}
    pass_rate_by_source: dict[str, float] = {}
    eval_set: str = ""
    """This field and the two below are as they were announced."""
    is_main: bool = True
    num_samples: PositiveInt = 1
    pass_at_k: dict[int, float] = {}
    """k -> probability that one of k attempts solves a task, unbiased (arXiv 2107.03374), mean over
    the tasks with at least k counted attempts."""

    def key(self) -> str:
        """One per evaluation."""
        return self.eval_id
