"""The commands of a group, and of an evaluation: pure functions of the log."""

import random
from collections.abc import Sequence

import msgspec

from penstock.actors.pacer.config import PacerConfig, TreeConfig
from penstock.envs.tasks.choice import eligible_tasks
from penstock.messages.reward import EvalRequested
from penstock.messages.task import (
    Branch,
    Branching,
    Purpose,
    Sampling,
    StartRollout,
    Task,
)


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
    """Return the commands of an evaluation: `e<eval_id>-<i>` in group `<eval_id>`, task by task.

    Tasks are taken at even distances, sorted by category: fewer than all still cover every
    category, and each evaluation of a run attempts the same ones.
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
