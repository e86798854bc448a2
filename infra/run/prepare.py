"""Builds what a run starts from, for its configuration and seed, into its object store.

The tokenizer and the corpora of mid-training (`infra/quickstart/midtrain_data.py`), and tasks and
their hidden tests of both splits (`envs/tasks/storage.py`). The same settings and seed give the
same bytes. Importing this module imports no torch.
"""

import asyncio
import random
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.tokenizer import TOKENIZER_KEY
from penstock.envs.ladder.generate import LadderSource
from penstock.envs.tasks.harbor_read import MalformedTaskError, read_harbor_set
from penstock.envs.tasks.source import TaskCandidate
from penstock.envs.tasks.storage import hidden_tests_key, task_objects, tasks_key
from penstock.infra.corpora.builder import MIDTRAIN_HELDOUT_KEY, MIDTRAIN_KEY
from penstock.infra.quickstart.config import PrepareConfig
from penstock.infra.quickstart.midtrain_data import midtrain_objects, until
from penstock.messages.bus import ObjectStore
from penstock.messages.task import Split

OBJECT_KEYS = (
    TOKENIZER_KEY,
    MIDTRAIN_KEY,
    MIDTRAIN_HELDOUT_KEY,
    *(key(split) for key in (tasks_key, hidden_tests_key) for split in Split),
)


async def prepare(
    config: PrepareConfig,
    policy: PolicyConfig,
    store: ObjectStore,
    seed: int,
    say: Callable[[str], None],
) -> None:
    """Put all objects unless all are there; cancelled, it ends soon, and has put none.

    Args:
        config: What to build.
        policy: For the size of its vocabulary.
        store: Of the run.
        seed: Decides every draw.
        say: Called with progress in words.

    """
    if all([await store.exists(key) for key in OBJECT_KEYS]):
        return
    say(f"preparing {config.num_train_tasks} tasks and {config.num_demonstrations} demonstrations")
    stopped = threading.Event()
    try:
        objects = await asyncio.to_thread(build, config, policy, seed, stopped)
    finally:
        stopped.set()  # A thread cannot be cancelled: it looks at this before each task and text.
    for key, data in objects.items():
        await store.put(key, data)


def build(
    config: PrepareConfig, policy: PolicyConfig, seed: int, stopped: threading.Event
) -> dict[str, bytes]:
    """Return every object by its key.

    Raises:
        PreparationStoppedError: `stopped` was set meanwhile.

    """
    draw = _harbor_tasks if config.tasks else _ladder_tasks
    objects: dict[str, bytes] = {}
    for split, candidates in draw(config, seed).items():
        objects |= task_objects(until(stopped, candidates), split)
    return objects | midtrain_objects(config, policy, seed, stopped)


def _ladder_tasks(config: PrepareConfig, seed: int) -> dict[Split, Iterable[TaskCandidate]]:
    nums = {Split.TRAIN: config.num_train_tasks, Split.HELDOUT: config.num_heldout_tasks}
    return {
        split: (
            msgspec.structs.replace(
                one, task=msgspec.structs.replace(one.task, limits=config.limits)
            )
            for one in LadderSource(
                split, num, config.selection, random.Random(f"{split}/{seed}"), split.value
            ).candidates()
        )
        for split, num in nums.items()
    }


def _harbor_tasks(config: PrepareConfig, seed: int) -> dict[Split, Iterable[TaskCandidate]]:
    candidates = read_harbor_set(Path(config.tasks), egress_addresses=config.egress_addresses)
    chosen = {split: [one for one in candidates if one.task.split is split] for split in Split}
    for split, tasks in chosen.items():
        if not tasks:
            words = f'[metadata.penstock] split = "{split}" makes one of a task'
            raise MalformedTaskError(f"{config.tasks}: expected tasks of both splits; {words}")
    return dict(chosen)
