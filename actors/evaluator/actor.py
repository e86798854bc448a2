"""The evaluator: has versions evaluated on held-out tasks and records the result.

```
 a version is due ─▶ EvalAnnounced: replicas that serve `eval` hold it, and no other
        one of them serves it ─▶ EvalRequested: rollouts of its tasks, pinned to the version
              every verdict, or the deadline ─▶ EvalCompleted: the replicas go on
```
With several sets each is an evaluation of its own. A verdict on tokens of any other version is not
counted, and its number is part of the result. The evaluations are recorded; they stop nothing but a
run with `trainer.pass_rate_stop`.
"""

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from penstock.actors.evaluator.evaluation import EvalBook
from penstock.actors.evaluator.schedule import EvalSetConfig, EvaluatorConfig
from penstock.actors.policy.replicas.table import ReplicaTable
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.envs.tasks.choice import eligible_tasks
from penstock.envs.tasks.storage import load_tasks
from penstock.messages.base import Event
from penstock.messages.control import RunFinished
from penstock.messages.errors import ConfigError
from penstock.messages.generation import ReplicaReported, pinned
from penstock.messages.reward import (
    EvalAnnounced,
    EvalCompleted,
    EvalRequested,
    Verdict,
    evaluation_id,
)
from penstock.messages.task import Purpose, Split
from penstock.messages.training import MidtrainCompleted, StepCompleted


class Evaluator(Actor):
    """Asks for evaluations and counts their verdicts; its state follows from the log."""

    role = "evaluator"
    can_skip = False
    tick_s = 1.0
    follows: ClassVar[tuple[type[Event], ...]] = (
        MidtrainCompleted,
        StepCompleted,
        RunFinished,
        EvalAnnounced,
        EvalRequested,
        EvalCompleted,
        Verdict,
        ReplicaReported,
    )

    def __init__(self, config: EvaluatorConfig) -> None:
        """Start with nothing due."""
        self._config = config
        self._book = EvalBook()
        self._replicas = ReplicaTable()
        self._num_tasks: dict[str, int] = {}
        """Of each set."""

    async def start(self, ctx: Context) -> Effects:
        """Count the held-out tasks of each set.

        Raises:
            ConfigError: A set has none.

        """
        heldout = await load_tasks(ctx.store, Split.HELDOUT)
        for each in self._config.all_sets:
            num = len(eligible_tasks(heldout, each.sources, each.categories))
            if each.name and num == 0:
                text = "expected held-out tasks of its sources and categories, there are none"
                raise ConfigError(f"evaluator.sets.{each.name}: {text}")
            self._num_tasks[each.name] = min(each.num_tasks, num)
        return ()

    async def on_midtrain_completed(self, event: MidtrainCompleted, ctx: Context) -> Effects:
        """Make version 0 due."""
        return self._announced(0, self._config.all_sets)

    async def on_step_completed(self, event: StepCompleted, ctx: Context) -> Effects:
        """Make the version due where a period ends with it."""
        version = event.policy_version
        return self._announced(version, self._config.due(version))

    async def on_run_finished(self, event: RunFinished, ctx: Context) -> Effects:
        """Make the last version due; of a run that was given up, nobody asks."""
        return () if event.is_failure else self._announced(event.step, self._config.all_sets)

    async def on_eval_announced(self, event: EvalAnnounced, ctx: Context) -> Effects:
        """Open the evaluation."""
        return [*_effects(self._book.announce(event)), *self._request(ctx)]

    async def on_eval_requested(self, event: EvalRequested, ctx: Context) -> Effects:
        """Do not request it again."""
        self._book.requested(event.eval_id)
        return ()

    async def on_eval_completed(self, event: EvalCompleted, ctx: Context) -> Effects:
        """Close the evaluation: after a restart its result is on the log."""
        self._book.completed(event.eval_id)
        return self._request(ctx)

    async def on_verdict(self, event: Verdict, ctx: Context) -> Effects:
        """Count a verdict of an evaluation."""
        if event.purpose is not Purpose.EVAL or event.judge != self._config.judge:
            return ()
        return _effects(self._book.add(event))

    async def on_replica_reported(self, event: ReplicaReported, ctx: Context) -> Effects:
        """Request the evaluation whose version is now served."""
        self._replicas.add(event, ctx.monotonic())
        return self._request(ctx)

    async def on_tick(self, ctx: Context) -> Effects:
        """Close an evaluation that takes too long."""
        self._replicas.expire(ctx.monotonic())
        return _effects(self._book.expire(ctx.monotonic(), self._config.eval_deadline_s))

    def _announced(
        self, policy_version: int, sets: Sequence[EvalSetConfig]
    ) -> Sequence[EvalAnnounced]:
        main = self._config.all_sets[0].name
        return [
            EvalAnnounced(
                eval_id=evaluation_id(policy_version, each.name),
                policy_version=policy_version,
                num_tasks=self._num_tasks[each.name],
                eval_set=each.name,
                is_main=each.name == main,
                num_samples=each.num_samples,
                temperature=each.temperature,
                sources=each.sources,
                categories=each.categories,
            )
            for each in sets
        ]

    def _request(self, ctx: Context) -> Effects:
        """Start the current evaluation's rollouts as soon as a replica serves its version.

        The first rollouts of training come before those of version 0: workers take what they are
        given in order.
        """
        due = self._book.to_request(ctx.monotonic())
        if due is None or not self._replicas.ready(Purpose.EVAL, pinned(due.policy_version)):
            return ()
        if due.policy_version == 0 and not self._replicas.ready(Purpose.TRAIN):
            return ()
        self._book.requested(due.eval_id)
        return (EvalRequested(**msgspec.structs.asdict(due)),)


def _effects(completed: EvalCompleted | None) -> Effects:
    return () if completed is None else (completed,)
