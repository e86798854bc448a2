"""The pacer: turns staleness credits into rollout commands.

Ids of commands follow from the group alone. A command published twice (a restart between two
publishes) is therefore the same command: the stream keeps one, and a worker that receives the
other finds the rollout finished.
"""

import random
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from penstock.actors.pacer.config import PacerConfig, TreeConfig
from penstock.actors.pacer.curriculum import Curriculum
from penstock.actors.pacer.staleness_budget import Budget
from penstock.actors.pacer.task_quarantine import TaskQuarantine
from penstock.actors.policy.replicas.table import ReplicaTable
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.envs.tasks.storage import load_tasks
from penstock.messages.base import Event
from penstock.messages.control import ItemQuarantined, RunFinished, RunOpened
from penstock.messages.generation import ReplicaReported
from penstock.messages.reward import EvalCompleted, EvalRequested
from penstock.messages.task import (
    Branch,
    Branching,
    CreditsChanged,
    Purpose,
    Sampling,
    Split,
    StartRollout,
    Task,
)
from penstock.messages.training import BatchManifest, MidtrainCompleted, StepCompleted


class Pacer(Actor):
    """Grants groups as the budget allows; its state follows from the log.

    The budget counts the version that every replica of training serves, since that is the oldest
    that a new rollout can meet. A replica that left or is silent counts no longer; while there is
    none, nothing more is granted.

    Commands go out before the credits that count them: after a crash in between, the same groups
    are granted again under the same ids, and none is lost.
    """

    role = "pacer"
    tick_s = 1.0
    can_skip = False
    follows: ClassVar[tuple[type[Event], ...]] = (
        MidtrainCompleted,
        StepCompleted,
        BatchManifest,
        ReplicaReported,
        EvalRequested,
        EvalCompleted,
        ItemQuarantined,
        RunFinished,
        RunOpened,
    )

    def __init__(self, config: PacerConfig) -> None:
        """Start with an empty budget."""
        self._config = config
        self._budget = Budget(
            groups_per_batch=config.groups_per_batch,
            staleness_max=config.staleness_granted,
            steps_max=config.steps_max,
        )
        self._trainer_version = -1
        self._replicas = ReplicaTable()
        self._has_baseline = not config.await_baseline
        self._curriculum: Curriculum
        self._heldout: Sequence[Task] = ()
        self._published: CreditsChanged | None = None
        self._quarantine = TaskQuarantine()

    async def start(self, ctx: Context) -> Effects:
        """Load the tasks, and take up the count of grants where an earlier incarnation left it.

        Raises:
            ConfigError: The settings name a category that no training task has.
            NotFoundError: The run's store has no task sets.

        """
        config = self._config
        tasks = await load_tasks(ctx.store, Split.TRAIN)
        self._curriculum = Curriculum(config.seed, tasks, config.category_weights)
        self._heldout = await load_tasks(ctx.store, Split.HELDOUT)
        self._published = await ctx.last(CreditsChanged)
        if self._published is not None:
            self._budget = self._budget.resumed_at(self._published.num_groups_granted)
        return ()

    async def on_midtrain_completed(self, event: MidtrainCompleted, ctx: Context) -> Effects:
        """Version 0 exists."""
        return self._move_to(0, ctx)

    async def on_step_completed(self, event: StepCompleted, ctx: Context) -> Effects:
        """Count a new version."""
        return self._move_to(event.policy_version, ctx)

    async def on_replica_reported(self, event: ReplicaReported, ctx: Context) -> Effects:
        """Count the version that a replica samples under."""
        self._replicas.add(event, ctx.monotonic())
        return self._grant(ctx)

    async def on_tick(self, ctx: Context) -> Effects:
        """Count no replica that is silent."""
        self._replicas.expire(ctx.monotonic())
        return self._grant(ctx)

    async def on_batch_manifest(self, event: BatchManifest, ctx: Context) -> Effects:
        """Count trained and discarded groups."""
        version, num_trained = event.policy_version, len(event.groups)
        self._budget = self._budget.with_batch(version, num_trained, len(event.discarded))
        return self._grant(ctx)

    async def on_eval_completed(self, event: EvalCompleted, ctx: Context) -> Effects:
        """Open the gate after the baseline."""
        self._has_baseline = self._has_baseline or event.policy_version == 0
        return self._grant(ctx)

    async def on_eval_requested(self, event: EvalRequested, ctx: Context) -> Effects:
        """Have every chosen held-out task attempted once."""
        return eval_commands(self._config, event, self._heldout)

    async def on_item_quarantined(self, event: ItemQuarantined, ctx: Context) -> Effects:
        """Grant no group of a task whose rollouts end process after process."""
        task = self._quarantine.add(event)
        return () if task is None else (task,)

    async def on_run_opened(self, event: RunOpened, ctx: Context) -> Effects:
        """Grant again where a service simulates tasks beside its users."""
        if event.is_service:
            self._budget = self._budget.opened()
        return self._grant(ctx)

    async def on_run_finished(self, event: RunFinished, ctx: Context) -> Effects:
        """Grant no more."""
        self._budget = self._budget.closed()
        return ()

    def _move_to(self, trainer_version: int, ctx: Context) -> Effects:
        self._trainer_version = max(self._trainer_version, trainer_version)
        return self._grant(ctx)

    def _version(self) -> int:
        """Return the oldest version that a rollout granted now can meet."""
        served = [replica.policy_version for replica in self._replicas.ready(Purpose.TRAIN)]
        return min(self._trainer_version, *served) if served else self._budget.policy_version

    def _grant(self, ctx: Context) -> Effects:
        self._budget = self._budget.with_version(self._version())
        num_groups = self._budget.num_grantable if self._has_baseline else 0
        first, version = self._budget.num_granted, self._budget.policy_version
        effects: list[Event] = []
        for index in range(first, first + num_groups):
            task = self._curriculum.pick(index, self._quarantine.task_ids)
            effects += group_commands(self._config, index, task, version)
        self._budget = self._budget.with_granted(num_groups)
        return [*effects, *self._changed_credits(ctx)]

    def _changed_credits(self, ctx: Context) -> Effects:
        """Show the budget, unless nothing changed or a restart still reads what was shown."""
        credits, shown = _credits(self._budget), self._published
        ctx.set_gauge("groups_granted", credits.num_groups_granted)
        ctx.set_gauge("groups_allowed", credits.num_groups_allowed)
        if credits.policy_version < 0 or credits == shown:
            return ()
        if shown is not None and _progress(credits) < _progress(shown):
            return ()
        self._published = credits
        return (credits,)


def _credits(budget: Budget) -> CreditsChanged:
    return CreditsChanged(
        policy_version=budget.policy_version,
        num_groups_granted=budget.num_granted,
        num_groups_trained=budget.num_trained,
        num_groups_discarded=budget.num_discarded,
        num_groups_allowed=budget.num_allowed,
        staleness_max=budget.staleness_max,
    )


def _progress(credits: CreditsChanged) -> tuple[int, int, int]:
    return credits.policy_version, credits.num_groups_trained, credits.num_groups_granted


def group_commands(
    config: PacerConfig, group_index: int, task: Task, policy_version: int
) -> list[StartRollout]:
    """Return the commands of a training group, `g<index>-m<member>`: one per rollout, or a tree."""
    commands = [
        StartRollout(
            rollout_id=(rollout_id := f"g{group_index}-m{member}"),
            group_id=f"g{group_index}",
            group_index=group_index,
            group_size=config.group_size,
            member=member,
            purpose=Purpose.TRAIN,
            task=task,
            sampling=Sampling(
                temperature=config.temperature,
                top_p=config.top_p,
                num_tokens_max=task.limits.turn_tokens_max,
                seed=_sampling_seed(config.seed, rollout_id),
            ),
            policy_version=policy_version,
            harness=config.harness,
        )
        for member in range(config.group_size)
    ]
    return commands if config.tree is None else _bundled(commands, config.tree)


def _bundled(commands: Sequence[StartRollout], tree: TreeConfig) -> list[StartRollout]:
    """Return one command for each tree: its first rollout, and the others as branches of it."""
    return [
        msgspec.structs.replace(
            commands[start],
            branching=Branching(
                trunk_turns=tree.trunk_turns,
                branches=[
                    Branch(rollout_id=one.rollout_id, member=one.member, seed=one.sampling.seed)
                    for one in commands[start + 1 : start + tree.branches]
                ],
            ),
        )
        for start in range(0, len(commands), tree.branches)
    ]


def eval_commands(
    config: PacerConfig, request: EvalRequested, tasks: Sequence[Task]
) -> list[StartRollout]:
    """Return one command for each chosen held-out task: `e<eval_id>-<i>` in group `<eval_id>`.

    Tasks are taken at even distances, sorted by category: fewer than all still cover every
    category, and each evaluation of a run attempts the same ones.
    """
    num_tasks = min(request.num_tasks, len(tasks))
    by_category = sorted(tasks, key=lambda task: task.category)
    return [
        StartRollout(
            rollout_id=(rollout_id := f"e{request.eval_id}-{index}"),
            group_id=request.eval_id,
            group_index=request.policy_version,
            group_size=num_tasks,
            member=index,
            purpose=Purpose.EVAL,
            task=(task := by_category[index * len(tasks) // num_tasks]),
            sampling=Sampling(
                temperature=config.eval_temperature,
                num_tokens_max=task.limits.turn_tokens_max,
                seed=_sampling_seed(config.seed, rollout_id),
            ),
            policy_version=request.policy_version,
            harness=config.harness,
        )
        for index in range(num_tasks)
    ]


def _sampling_seed(seed: int, rollout_id: str) -> int:
    return random.Random(f"sampling.{seed}.{rollout_id}").getrandbits(31)
