"""A task of several steps, in one machine: what a step left is stored before the next is laid out.

```
 turn that ends step 0 ─▶ its files as EpisodeStepEnded ─▶ files, setup.sh of step 1 ─▶ next turn
```
The judge grades the stored files in machines of its own when the episode is over, so that no hidden
test comes near the worker.
"""

from collections.abc import Collection

from penstock.actors.rollout_worker.config import RolloutWorkerConfig
from penstock.actors.rollout_worker.episode_runner import EpisodeRunner
from penstock.actors.rollout_worker.turns import Journal
from penstock.envs.sandbox import Sandbox
from penstock.envs.tasks.changes import Changes, read_changes
from penstock.envs.tasks.workspace import contents_at, open_step
from penstock.messages.task import Task


async def read_left(
    sandbox: Sandbox,
    task: Task,
    step: int,
    config: RolloutWorkerConfig,
    layer_files: Collection[str],
) -> Changes:
    """Return what an episode changed by the end of a step; raises as `read_changes` does."""
    return await read_changes(
        sandbox,
        contents_at(task, step),
        num_files_max=config.num_files_max,
        num_bytes_max=config.files_bytes_max,
        has_layer=bool(task.image),
        layer_files=layer_files,
    )


async def open_next_step(
    runner: EpisodeRunner,
    task: Task,
    config: RolloutWorkerConfig,
    journal: Journal,
    layer_files: Collection[str],
) -> None:
    """Store what the step that has just ended left, once, and lay out the next one.

    Raises:
        ChangesError: What it left cannot be carried over.
        SetupError: The next one cannot be laid out on it.
        SandboxError: The machine failed.

    """
    turn_index = runner.conversation.step_ends[-1]
    step = len(runner.conversation.step_ends) - 1
    if not await journal.has_step_end(turn_index):
        left = await read_left(runner.sandbox, task, step, config, layer_files)
        await journal.end_step(step, turn_index, left)
    await open_step(runner.sandbox, task.steps[step])
