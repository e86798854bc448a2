"""The judge actor: one verdict for every finished rollout. `JUDGES` lists the judges."""

from collections.abc import Callable
from typing import ClassVar, Protocol

from penstock.actors.judge.config import JudgeConfig
from penstock.actors.judge.hidden_tests import HiddenTestsJudge, SameFilesJudge
from penstock.actors.judge.reward import Findings, outcome_of_end, reward_components
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.envs.tasks.storage import GradedTask, TaskBook
from penstock.messages.base import Event
from penstock.messages.codec import decode_as
from penstock.messages.control import MessageRejected
from penstock.messages.errors import ConfigError, NotFoundError
from penstock.messages.reward import Outcome, Verdict
from penstock.messages.rollout import RolloutFinished


class Judge(Protocol):
    """Finds out what a rollout achieved."""

    @property
    def name(self) -> str:
        """Its name in verdicts."""
        ...

    @property
    def version(self) -> str:
        """Goes up with every change to what it finds."""
        ...

    async def judge(self, rollout: RolloutFinished, task: GradedTask, ctx: Context) -> Findings:
        """Grade one rollout; failures of machines are an outcome, not an error."""
        ...


JUDGES: dict[str, Callable[[JudgeConfig], Judge]] = {
    HiddenTestsJudge.name: lambda config: SameFilesJudge(HiddenTestsJudge(config)),
}


def make_judge(config: JudgeConfig) -> Judge:
    """Return the judge that the settings name.

    Raises:
        ConfigError: There is none of that name.

    """
    if config.judge not in JUDGES:
        choices = ", ".join(sorted(JUDGES))
        raise ConfigError(f"judge.judge: {config.judge!r} is none of {choices}")
    return JUDGES[config.judge](config)


class JudgeActor(Actor):
    """Every rollout gets one verdict: graded, its own fault, or masked with the cause."""

    role = "judge"
    consumes: ClassVar[tuple[type[Event], ...]] = (RolloutFinished,)
    follows: ClassVar[tuple[type[Event], ...]] = (MessageRejected,)

    def __init__(self, config: JudgeConfig) -> None:
        """Make the judge that the settings name.

        Raises:
            ConfigError: There is none of that name.

        """
        self.num_concurrent = config.num_concurrent
        self._config = config
        self._judge = make_judge(config)
        self._tasks = TaskBook()

    async def on_rollout_finished(self, rollout: RolloutFinished, ctx: Context) -> Effects:
        """Judge one rollout."""
        started_at = ctx.monotonic()
        findings = await self._find(rollout, ctx)
        return (self._verdict(rollout, findings, ctx.monotonic() - started_at),)

    async def on_message_rejected(self, event: MessageRejected, ctx: Context) -> Effects:
        """Mask a rollout that no judge could handle: its group must not wait for ever.

        What was delivered too often is rejected by the bus of the judge's process, which bears the
        names of all its actors, joined by `+`.
        """
        if ctx.actor not in event.actor.split("+"):
            return ()
        rollout = decode_as(RolloutFinished, event.data)
        if rollout is None:
            return ()
        findings = Findings(outcome=Outcome.JUDGE_ERROR, detail=f"rejected: {event.cause}")
        return (self._verdict(rollout, findings, 0.0),)

    def _verdict(self, rollout: RolloutFinished, findings: Findings, elapsed_s: float) -> Verdict:
        components = reward_components(rollout, findings.outcome, self._config)
        return Verdict(
            rollout_id=rollout.rollout_id,
            group_id=rollout.group_id,
            group_index=rollout.group_index,
            purpose=rollout.purpose,
            judge=self._judge.name,
            judge_version=self._judge.version,
            outcome=findings.outcome,
            reward=sum(components.values()),
            components=components,
            num_tests_passed=findings.num_tests_passed,
            num_tests=findings.num_tests,
            policy_version=rollout.min_policy_version,
            category=rollout.category,
            sandbox=findings.sandbox,
            duration_ms=1e3 * elapsed_s,
            detail=findings.detail,
            findings=findings.cheats,
        )

    async def _find(self, rollout: RolloutFinished, ctx: Context) -> Findings:
        """Ask the judge, unless the episode's end decides the outcome or the task is unknown."""
        outcome = outcome_of_end(rollout.end)
        if outcome is not None:
            return Findings(outcome=outcome, detail=rollout.error)
        try:
            task = await self._tasks.find(ctx.store, rollout.purpose, rollout.task_id)
        except NotFoundError as error:
            return Findings(outcome=Outcome.JUDGE_ERROR, detail=str(error))
        return await self._judge.judge(rollout, task, ctx)
