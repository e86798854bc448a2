"""The pacer: turns staleness credits into rollout commands.

Command ids follow from the group's index, and its task from the log (`GroupGranted`, published
first). A command that a restart publishes twice is therefore the same command: the stream keeps
one, and a worker that receives the other finds the rollout finished.
"""

import logging
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec

from penstock.actors.pacer.config import PacerConfig, TreeConfig
from penstock.actors.pacer.curriculum import Curriculum
from penstock.actors.pacer.staleness_budget import Budget
from penstock.actors.policy.replicas.table import ReplicaTable
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.envs.tasks.choice import eligible_tasks
from penstock.envs.tasks.storage import load_tasks
from penstock.messages.base import Event
from penstock.messages.control import ItemQuarantined, RunFinished, RunOpened
from penstock.messages.generation import ReplicaReported
from penstock.messages.reward import EvalAnnounced, EvalCompleted, EvalRequested
from penstock.messages.streams import check_token
from penstock.messages.task import (
    Branch,
    Branching,
    CreditsChanged,
    GroupGranted,
    Purpose,
    Sampling,
    Split,
    StartRollout,
    Task,
)
from penstock.messages.training import BatchManifest, MidtrainCompleted, StepCompleted

log = logging.getLogger(__name__)


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
    """Return one command per tree: its first rollout, with the others as branches."""
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
    """Return the commands of an evaluation: `e<eval_id>-<i>` in group `<eval_id>`, task by task.

    Tasks are sorted by category and taken at equal distances: a part of them still covers every
    category, and all evaluations of a run attempt the same tasks.
    """
    by_category = eligible_tasks(tasks, request.sources, request.categories)
    num_tasks = min(request.num_tasks, len(by_category))
    temperature = request.temperature
    return [
        StartRollout(
            rollout_id=(rollout_id := f"e{request.eval_id}-{index}"),
            group_id=request.eval_id,
            group_index=request.policy_version,
            group_size=num_tasks * request.num_samples,
            member=index,
            purpose=Purpose.EVAL,
            task=(
                task := by_category[index // request.num_samples * len(by_category) // num_tasks]
            ),
            sampling=Sampling(
                temperature=config.eval_temperature if temperature is None else temperature,
                num_tokens_max=task.limits.turn_tokens_max,
                seed=_sampling_seed(config.seed, rollout_id),
            ),
            policy_version=request.policy_version,
            harness=config.harness,
        )
        for index in range(num_tasks * request.num_samples)
    ]


def _sampling_seed(seed: int, rollout_id: str) -> int:
    return random.Random(f"sampling.{seed}.{rollout_id}").getrandbits(31)


ROLLOUTS_MAX = 2
"""Quarantined rollouts that quarantine their task: a single one may be the policy's doing."""
_ITEM = "pacer.Task."


class TaskQuarantine:
    """Quarantines tasks whose rollouts were quarantined; no group is granted for them."""

    def __init__(self) -> None:
        self.task_ids: set[str] = set()
        self._rollouts: defaultdict[str, set[str]] = defaultdict(set)

    def add(self, event: ItemQuarantined) -> ItemQuarantined | None:
        """Record a quarantined item; return the quarantine of its task, if it follows."""
        task_id = event.task_id
        if not task_id or event.item.startswith(_ITEM):
            return None
        rollouts = self._rollouts[task_id]
        # Without the role: one rollout may be quarantined by a worker and by the judge.
        rollouts.add(event.item.split(".", 2)[-1])
        if len(rollouts) < ROLLOUTS_MAX or task_id in self.task_ids:
            return None
        self.task_ids.add(task_id)
        # Item names are subject tokens on the bus; task ids may be any text.
        name = task_id.encode().hex() if not _is_token(task_id) else task_id
        cause = f"{len(rollouts)} of its rollouts are quarantined: {', '.join(sorted(rollouts))}"
        log.error("task %s: quarantined: %s", task_id, cause)
        return ItemQuarantined(item=f"{_ITEM}{name}", cause=cause, task_id=task_id)


def _is_token(text: str) -> bool:
    try:
        check_token(text, "task_id")
    except ValueError:
        return False
    return True


class Pacer(Actor):
    """Grants groups as the budget allows; its state follows from the log.

    The budget uses the oldest version that a training replica serves, because a new rollout may be
    sampled from it. Silent replicas do not count; without replicas nothing is granted.
    """

    role = "pacer"
    tick_s = 1.0
    can_skip = False
    saved = (
        "_budget",
        "_trainer_version",
        "_has_baseline",
        "_baselines",
        "_curriculum",
        "_quarantine",
    )
    follows: ClassVar[tuple[type[Event], ...]] = (
        MidtrainCompleted,
        StepCompleted,
        BatchManifest,
        GroupGranted,
        ReplicaReported,
        EvalAnnounced,
        EvalRequested,
        EvalCompleted,
        ItemQuarantined,
        RunFinished,
        RunOpened,
    )

    def __init__(
        self, config: PacerConfig, source_weights: Mapping[str, float] | None = None
    ) -> None:
        """Start with an empty budget.

        Args:
            source_weights: Weight of each source of tasks; by default all tasks weigh the same.

        """
        self._config = config
        self._source_weights = source_weights or {}
        self._budget = Budget(
            groups_per_batch=config.groups_per_batch,
            staleness_max=config.staleness_granted,
            steps_max=config.steps_max,
        )
        self._trainer_version = -1
        self._replicas = ReplicaTable()
        self._has_baseline = not config.await_baseline
        self._baselines: set[str] = set()
        """Evaluations of version 0 that are announced but not complete."""
        self._curriculum: Curriculum
        self._heldout: Sequence[Task] = ()
        self._published: CreditsChanged | None = None
        self._quarantine = TaskQuarantine()

    async def start(self, ctx: Context) -> Effects:
        """Load the tasks and resume the count of grants.

        Raises:
            ConfigError: The settings name a category that no training task has.
            NotFoundError: The run's store has no task sets.

        """
        config = self._config
        tasks = await load_tasks(ctx.store, Split.TRAIN)
        self._curriculum = Curriculum(tasks, config, self._source_weights)
        self._heldout = await load_tasks(ctx.store, Split.HELDOUT)
        self._published = await ctx.last(CreditsChanged)
        self.restored()
        return ()

    def restored(self) -> None:
        """Count the groups that were granted after the snapshot."""
        if self._published is not None:
            self._budget = self._budget.resumed_at(self._published.num_groups_granted)

    async def on_midtrain_completed(self, event: MidtrainCompleted, ctx: Context) -> Effects:
        """Start granting: version 0 exists."""
        return await self._move_to(0, ctx)

    async def on_step_completed(self, event: StepCompleted, ctx: Context) -> Effects:
        """Count a new version."""
        return await self._move_to(event.policy_version, ctx)

    async def on_replica_reported(self, event: ReplicaReported, ctx: Context) -> Effects:
        """Record the version that a replica serves."""
        self._replicas.add(event, ctx.monotonic())
        return await self._grant(ctx)

    async def on_tick(self, ctx: Context) -> Effects:
        """Forget silent replicas, which may unblock the budget."""
        self._replicas.expire(ctx.monotonic())
        return await self._grant(ctx)

    async def on_batch_manifest(self, event: BatchManifest, ctx: Context) -> Effects:
        """Count trained and discarded groups, and update their tasks' solve rates."""
        self._budget = self._budget.with_batch(
            event.policy_version, event.num_placed, event.num_made_up_for
        )
        for group in event.groups:
            self._curriculum.settle(group, event.step, differs=group.has_unequal_work)
        for group in event.discarded:
            self._curriculum.settle(group, event.step, differs=False)
        return await self._grant(ctx)

    async def on_group_granted(self, event: GroupGranted, ctx: Context) -> Effects:
        """Record a grant, possibly of the pacer before a restart."""
        self._curriculum.note(event)
        return ()

    async def on_eval_announced(self, event: EvalAnnounced, ctx: Context) -> Effects:
        """Record the evaluations of version 0; all are announced before one completes."""
        if event.policy_version == 0:
            self._baselines.add(event.eval_id)
        return ()

    async def on_eval_completed(self, event: EvalCompleted, ctx: Context) -> Effects:
        """Start granting once version 0 is evaluated."""
        self._baselines.discard(event.eval_id)
        if event.policy_version == 0 and not self._baselines and not self._has_baseline:
            self._has_baseline = True
            log.info("version 0 is evaluated: granting training groups")
        return await self._grant(ctx)

    async def on_eval_requested(self, event: EvalRequested, ctx: Context) -> Effects:
        """Publish the commands of an evaluation."""
        commands = eval_commands(self._config, event, self._heldout)
        log.info("evaluation %s: %d rollouts", event.eval_id, len(commands))
        return commands

    async def on_item_quarantined(self, event: ItemQuarantined, ctx: Context) -> Effects:
        """Quarantine a task whose rollouts crash process after process."""
        task = self._quarantine.add(event)
        return () if task is None else (task,)

    async def on_run_opened(self, event: RunOpened, ctx: Context) -> Effects:
        """Resume granting if the run continues as a service."""
        if event.is_service:
            self._budget = self._budget.opened()
        return await self._grant(ctx)

    async def on_run_finished(self, event: RunFinished, ctx: Context) -> Effects:
        """Stop granting."""
        self._budget = self._budget.closed()
        log.info("the run is finished: no more grants after %d", self._budget.num_granted)
        return ()

    async def _move_to(self, trainer_version: int, ctx: Context) -> Effects:
        self._trainer_version = max(self._trainer_version, trainer_version)
        return await self._grant(ctx)

    def _version(self) -> int:
        # The oldest version from which a rollout that is granted now may be sampled.
        served = [replica.policy_version for replica in self._replicas.ready(Purpose.TRAIN)]
        return min(self._trainer_version, *served) if served else self._budget.policy_version

    async def _grant(self, ctx: Context) -> Effects:
        # The version first: it decides how many groups the staleness bound allows.
        self._budget = self._budget.with_version(self._version())
        first, version = self._budget.num_granted, self._budget.policy_version
        # After a restart, all earlier grants have to be read before new ones are made.
        is_ready = self._has_baseline and self._curriculum.num_noted >= first
        num_groups = self._budget.num_grantable if is_ready else 0
        effects: list[Event] = []
        for index in range(first, first + num_groups):
            task = await self._granted_task(index, ctx)
            effects += group_commands(self._config, index, task, version)
        self._budget = self._budget.with_granted(num_groups)
        if num_groups:
            log.debug("%d groups granted from %d on, at version %d", num_groups, first, version)
        # Commands before the credits that count them: after a crash in between, the same groups
        # are granted again under the same ids, and none is lost.
        return [*effects, *self._changed_credits(ctx)]

    async def _granted_task(self, group_index: int, ctx: Context) -> Task:
        granted = self._curriculum.pick(group_index, self._quarantine.task_ids)
        [receipt] = await ctx.publish(granted)
        # The log decides: the pacer before a restart may have picked another task for this group.
        if receipt.is_duplicate:
            granted = await ctx.last(GroupGranted, granted.key()) or granted
        self._curriculum.note(granted)
        return self._curriculum.task(granted.task_id)

    def _changed_credits(self, ctx: Context) -> Effects:
        budget, shown = self._budget, self._published
        credits = CreditsChanged(
            policy_version=budget.policy_version,
            num_groups_granted=budget.num_granted,
            num_groups_trained=budget.num_trained,
            num_groups_discarded=budget.num_discarded,
            num_groups_allowed=budget.num_allowed,
            staleness_max=budget.staleness_max,
        )
        ctx.set_gauge("groups_granted", credits.num_groups_granted)
        ctx.set_gauge("groups_allowed", credits.num_groups_allowed)
        if credits.policy_version < 0 or credits == shown:
            return ()
        if shown is not None and _progress(credits) < _progress(shown):
            return ()  # After a restart, until the log is read up to what was published.
        self._published = credits
        return (credits,)


def _progress(credits: CreditsChanged) -> tuple[int, int, int]:
    return credits.policy_version, credits.num_groups_trained, credits.num_groups_granted
