"""The judge actor: one verdict for every finished rollout."""

import logging
from typing import ClassVar

import msgspec

from penstock.actors.judge.config import JudgeConfig
from penstock.actors.judge.judges import LengthMeter, Panel, make_judge
from penstock.actors.judge.reward import Findings, outcome_of_end, reward_components
from penstock.actors.judge.set_ups import SetUps
from penstock.actors.policy.chat.format import ChatFormat
from penstock.actors.policy.replicas.table import ReplicaTable
from penstock.actors.policy.summaries import SummaryConfig
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.envs.sandbox import SandboxError
from penstock.envs.tasks.grading import TaskUnfitError
from penstock.envs.tasks.storage import TaskBook
from penstock.messages.base import Event
from penstock.messages.control import MessageRejected
from penstock.messages.errors import CodecError, DeadlineError, NotFoundError
from penstock.messages.generation import ReplicaReported
from penstock.messages.reading.rejected import read_rejected
from penstock.messages.reading.trajectories import read_trajectory
from penstock.messages.reward import Outcome, Verdict
from penstock.messages.rollout import RolloutFinished

log = logging.getLogger(__name__)


class JudgeActor(Actor):
    """Publishes one verdict per rollout: graded, the policy's fault, or masked with the cause."""

    role = "judge"
    consumes: ClassVar[tuple[type[Event], ...]] = (RolloutFinished,)
    follows: ClassVar[tuple[type[Event], ...]] = (MessageRejected, ReplicaReported)
    tick_s = 1.0

    def __init__(
        self, chat: ChatFormat, config: JudgeConfig, summary: SummaryConfig | None = None
    ) -> None:
        """Create the judge that the settings name.

        Raises:
            ConfigError: No judge has that name.

        """
        self.num_concurrent = config.num_concurrent
        self._config = config
        self._chat = chat
        self._judge = make_judge(config)
        self._meter = LengthMeter(chat, (summary or SummaryConfig()).request)
        self._tasks = TaskBook()
        self._set_ups = SetUps(config)
        self._replicas = ReplicaTable()
        self._panel: Panel | None = None

    async def start(self, ctx: Context) -> Effects:
        """Create the additional judges; raises what `Panel` raises."""
        self._panel = Panel(self._config, self._chat, self._replicas, ctx)
        others = ", ".join(one.name for one in self._config.judges) or "no other judges"
        name, version = self._config.judge, self._judge.version
        log.info("%s version %s, %s, %d at once", name, version, others, self.num_concurrent)
        return ()

    async def on_rollout_finished(self, rollout: RolloutFinished, ctx: Context) -> Effects:
        """Judge one rollout."""
        started_at = ctx.monotonic()
        findings = await self._find(rollout, ctx)
        return (self._verdict(rollout, findings, ctx.monotonic() - started_at),)

    async def on_message_rejected(self, event: MessageRejected, ctx: Context) -> Effects:
        """Mask a rollout whose delivery the bus gave up on, or its group would wait forever."""
        # The bus of a process rejects under the names of all actors in it, joined by `+`.
        if ctx.actor not in event.actor.split("+"):
            return ()
        rollout = await read_rejected(ctx.store, event, RolloutFinished)
        if rollout is None:
            return ()
        log.error("rollout %s: rejected by the bus: %s", rollout.rollout_id, event.cause)
        findings = Findings(outcome=Outcome.JUDGE_ERROR, detail=f"rejected: {event.cause}")
        return (self._verdict(rollout, findings, 0.0),)

    async def on_replica_reported(self, event: ReplicaReported, ctx: Context) -> Effects:
        """Record a replica; rubric judges may ask the run's own replicas."""
        self._replicas.add(event, ctx.monotonic())
        return ()

    async def on_tick(self, ctx: Context) -> Effects:
        """Forget silent replicas."""
        self._replicas.expire(ctx.monotonic())
        return ()

    def _verdict(self, rollout: RolloutFinished, findings: Findings, elapsed_s: float) -> Verdict:
        components = reward_components(findings, self._config)
        is_masked = findings.outcome.is_masked
        log.log(
            logging.WARNING if is_masked else logging.DEBUG,
            "rollout %s: %s after %.1f s: %s",
            *(rollout.rollout_id, findings.outcome, elapsed_s, findings.detail),
        )
        return Verdict(
            rollout_id=rollout.rollout_id,
            group_id=rollout.group_id,
            group_index=rollout.group_index,
            purpose=rollout.purpose,
            judge=self._config.judge,
            judge_version=self._judge.version,
            outcome=findings.outcome,
            reward=sum(components.values()),
            components=components,
            score=findings.score,
            scores=findings.scores,
            lengths=findings.lengths,
            num_tests_passed=findings.num_tests_passed,
            num_tests=findings.num_tests,
            policy_version=rollout.min_policy_version,
            policy_version_max=rollout.max_policy_version,
            category=rollout.category,
            source=rollout.source,
            sandbox=findings.sandbox,
            duration_ms=1e3 * elapsed_s,
            detail=findings.detail,
            findings=findings.cheats,
            unseparated=findings.unseparated,
        )

    async def _find(self, rollout: RolloutFinished, ctx: Context) -> Findings:
        outcome = outcome_of_end(rollout.end)
        if outcome is not None:
            return Findings(outcome=outcome, detail=rollout.error)
        try:
            task = await self._tasks.find(ctx.store, rollout.purpose, rollout.task_id)
            trajectory = await read_trajectory(ctx.store, ctx.last, rollout)
            task = await self._set_ups.add(task, ctx)
        except (NotFoundError, CodecError, TaskUnfitError) as error:
            return Findings(outcome=Outcome.JUDGE_ERROR, detail=str(error))
        except (SandboxError, DeadlineError) as error:
            detail = f"set-up of the task: {error}"
            return Findings(outcome=Outcome.INFRASTRUCTURE_ERROR, detail=detail)
        findings = await self._judge.judge(trajectory, task, ctx)
        # Own code returns findings too: lengths come from the recorded turns, never from a judge.
        findings = msgspec.structs.replace(
            findings,
            unseparated=task.hidden.unseparated,
            lengths=self._meter.measure(rollout, trajectory.turns, task.task),
        )
        assert self._panel is not None, "`start` creates it"
        return await self._panel.add(findings, trajectory, task)
