"""The evaluator: requests evaluations of policy versions on held-out tasks and records the results.

```
 a version is due ─▶ EvalAnnounced: replicas that serve `eval` load this version and keep it
        one of them serves it ─▶ EvalRequested: rollouts of its tasks, pinned to the version
              every verdict, or the deadline ─▶ EvalCompleted: the replicas move on
```
Each task set is a separate evaluation. Verdicts on rollouts that contain tokens of another version
are not counted; the result reports how many there were. Results do not influence training, unless
`trainer.pass_rate_stop` is set.
"""

import logging
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

log = logging.getLogger(__name__)


class Evaluator(Actor):
    """Requests evaluations and counts their verdicts; its state is rebuilt from the log."""

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
        """Start with no evaluation due."""
        self._config = config
        self._book = EvalBook()
        self._replicas = ReplicaTable()
        self._num_tasks: dict[str, int] = {}
        """Number of tasks in each set, by set name."""

    async def start(self, ctx: Context) -> Effects:
        """Count the held-out tasks of each set.

        Raises:
            ConfigError: No held-out task matches a set's sources and categories.

        """
        heldout = await load_tasks(ctx.store, Split.HELDOUT)
        for eval_set in self._config.all_sets:
            num = len(eligible_tasks(heldout, eval_set.sources, eval_set.categories))
            # Only a named set must have tasks: the unnamed default stands for "whatever there is",
            # and a run without held-out tasks is legal.
            if eval_set.name and num == 0:
                text = "expected held-out tasks that match its sources and categories, found none"
                raise ConfigError(f"evaluator.sets.{eval_set.name}: {text}")
            self._num_tasks[eval_set.name] = min(eval_set.num_tasks, num)
            log.info("evaluation set %r has %d tasks", eval_set.name, min(eval_set.num_tasks, num))
        return ()

    async def on_midtrain_completed(self, event: MidtrainCompleted, ctx: Context) -> Effects:
        """Announce the evaluation of version 0."""
        return self._announced(0, self._config.all_sets)

    async def on_step_completed(self, event: StepCompleted, ctx: Context) -> Effects:
        """Announce the evaluations that are due at this version."""
        version = event.policy_version
        return self._announced(version, self._config.due(version))

    async def on_run_finished(self, event: RunFinished, ctx: Context) -> Effects:
        """Announce the evaluation of the final version, unless the run failed."""
        # The final version may have been announced at its step already; the book ignores repeats.
        return () if event.is_failure else self._announced(event.step, self._config.all_sets)

    async def on_eval_announced(self, event: EvalAnnounced, ctx: Context) -> Effects:
        """Open the evaluation, and request it if its version is already served."""
        return [*_effects(self._book.announce(event)), *self._request(ctx)]

    async def on_eval_requested(self, event: EvalRequested, ctx: Context) -> Effects:
        """Record that the rollouts are requested, so that a restart does not repeat the request."""
        self._book.requested(event.eval_id)
        return ()

    async def on_eval_completed(self, event: EvalCompleted, ctx: Context) -> Effects:
        """Close the evaluation and request the next one.

        After a restart this event is the only sign that the evaluation has ended.
        """
        self._book.completed(event.eval_id)
        return self._request(ctx)

    async def on_verdict(self, event: Verdict, ctx: Context) -> Effects:
        """Count a verdict of an evaluation."""
        if event.purpose is not Purpose.EVAL or event.judge != self._config.judge:
            return ()
        return _effects(self._book.add(event))

    async def on_replica_reported(self, event: ReplicaReported, ctx: Context) -> Effects:
        """Request the next evaluation if a replica now serves its version."""
        self._replicas.add(event, ctx.monotonic())
        return self._request(ctx)

    async def on_tick(self, ctx: Context) -> Effects:
        """Close an evaluation that exceeds its deadline."""
        self._replicas.expire(ctx.monotonic())
        completed = self._book.expire(ctx.monotonic(), self._config.eval_deadline_s)
        if completed is not None:
            log.warning(
                "evaluation %s reached its deadline of %g s; %d missing verdicts count as masked",
                completed.eval_id,
                self._config.eval_deadline_s,
                completed.num_masked,
            )
        return _effects(completed)

    def _announced(
        self, policy_version: int, sets: Sequence[EvalSetConfig]
    ) -> Sequence[EvalAnnounced]:
        main = self._config.all_sets[0].name
        return [
            EvalAnnounced(
                eval_id=evaluation_id(policy_version, eval_set.name),
                policy_version=policy_version,
                num_tasks=self._num_tasks[eval_set.name],
                eval_set=eval_set.name,
                is_main=eval_set.name == main,
                num_samples=eval_set.num_samples,
                temperature=eval_set.temperature,
                sources=eval_set.sources,
                categories=eval_set.categories,
            )
            for eval_set in sets
        ]

    def _request(self, ctx: Context) -> Effects:
        """Start the current evaluation's rollouts as soon as a replica serves its version."""
        due = self._book.to_request(ctx.monotonic())
        if due is None or not self._replicas.ready(Purpose.EVAL, pinned(due.policy_version)):
            return ()
        # Workers take requests in order. Evaluating version 0 before training replicas are ready
        # would put the first training rollouts behind a whole evaluation.
        if due.policy_version == 0 and not self._replicas.ready(Purpose.TRAIN):
            return ()
        # Marked before the event is published: another replica report may arrive in between.
        self._book.requested(due.eval_id)
        log.info(
            "requesting evaluation %s: version %d on %d tasks, %d samples each",
            due.eval_id,
            due.policy_version,
            due.num_tasks,
            due.num_samples,
        )
        return (EvalRequested(**msgspec.structs.asdict(due)),)


def _effects(completed: EvalCompleted | None) -> Effects:
    if completed is None:
        return ()
    log.info(
        "evaluation %s completed: version %d solved %d of %d, %d masked, %d of another version",
        completed.eval_id,
        completed.policy_version,
        completed.num_solved,
        completed.num_tasks,
        completed.num_masked,
        completed.num_wrong_version,
    )
    return (completed,)
