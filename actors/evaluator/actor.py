"""The evaluator: has versions evaluated on held-out tasks and records the result.

In this first form every version is served as soon as it is applied; the evaluations are recorded,
they stop nothing. Shadowing, canaries, promotion and rollback are not there.
"""

from typing import ClassVar

from penstock.actors.evaluator.evaluation import EvalBook
from penstock.actors.evaluator.schedule import EvalSchedule, EvaluatorConfig
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.envs.tasks.storage import load_tasks
from penstock.messages.base import Event
from penstock.messages.control import RunFinished
from penstock.messages.reward import EvalCompleted, EvalRequested, Verdict
from penstock.messages.task import Purpose, Split
from penstock.messages.training import MidtrainCompleted, StepCompleted
from penstock.messages.weights import WeightsApplied


class Evaluator(Actor):
    """Asks for evaluations and counts their verdicts; its state follows from the log."""

    role = "evaluator"
    tick_s = 1.0
    follows: ClassVar[tuple[type[Event], ...]] = (
        MidtrainCompleted,
        StepCompleted,
        WeightsApplied,
        RunFinished,
        EvalRequested,
        EvalCompleted,
        Verdict,
    )

    def __init__(self, config: EvaluatorConfig) -> None:
        """Start with nothing due."""
        self._config = config
        self._schedule = EvalSchedule(config.eval_every_steps, config.replicas)
        self._book = EvalBook()

    async def on_midtrain_completed(self, event: MidtrainCompleted, ctx: Context) -> Effects:
        """Make version 0 due."""
        self._schedule.make_due(0)
        return await self._request_due(ctx)

    async def on_step_completed(self, event: StepCompleted, ctx: Context) -> Effects:
        """Make the version due if the period ends with it."""
        self._schedule.stepped(event.policy_version)
        return await self._request_due(ctx)

    async def on_run_finished(self, event: RunFinished, ctx: Context) -> Effects:
        """Make the last version due."""
        self._schedule.make_due(event.step)
        return await self._request_due(ctx)

    async def on_weights_applied(self, event: WeightsApplied, ctx: Context) -> Effects:
        """Request due versions that are now served."""
        self._schedule.applied(event.replica, event.policy_version)
        return await self._request_due(ctx)

    async def on_eval_requested(self, event: EvalRequested, ctx: Context) -> Effects:
        """Open the evaluation."""
        return _effects(self._book.request(event, ctx.monotonic()))

    async def on_eval_completed(self, event: EvalCompleted, ctx: Context) -> Effects:
        """Close the evaluation: after a restart its result is on the log."""
        self._book.completed(event.eval_id)
        return ()

    async def on_verdict(self, event: Verdict, ctx: Context) -> Effects:
        """Count a verdict of an evaluation."""
        if event.purpose is not Purpose.EVAL or event.judge != self._config.judge:
            return ()
        return _effects(self._book.add(event))

    async def on_tick(self, ctx: Context) -> Effects:
        """Close evaluations that miss verdicts for too long."""
        return self._book.expire(ctx.monotonic(), self._config.eval_deadline_s)

    async def _request_due(self, ctx: Context) -> Effects:
        versions = self._schedule.take_due()
        if not versions:
            return ()
        heldout = await load_tasks(ctx.store, Split.HELDOUT)
        num_tasks = min(self._config.num_eval_tasks, len(heldout))
        return [
            EvalRequested(eval_id=f"v{version}", policy_version=version, num_tasks=num_tasks)
            for version in versions
        ]


def _effects(completed: EvalCompleted | None) -> Effects:
    return () if completed is None else (completed,)
