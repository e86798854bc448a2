"""Builds what a run starts from, for its configuration and seed, into its object store.

`tokenizer.json`, the task sets `tasks/train` and `tasks/heldout` (msgpack `TaskSet`), and the
corpora `midtrain/tokens` and `midtrain/heldout`. The same settings and seed give the same bytes.
Importing this module imports no torch.
"""

import asyncio
import random
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from penstock.actors.policy.config import PolicyConfig
from penstock.envs.harness import HARNESS_VERSION
from penstock.envs.ladder.generate import Selection, draw_repositories
from penstock.envs.ladder.repository import LIMITS
from penstock.envs.ladder.source import LadderSource
from penstock.envs.ladder.transcripts import Habits
from penstock.envs.tasks.harbor_read import MalformedTaskError, read_harbor_set
from penstock.envs.tasks.source import to_task_set
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import PenstockError
from penstock.messages.settings import PositiveInt
from penstock.messages.task import Limits, Split

TOKENIZER_KEY = "tokenizer.json"
TRAIN_KEY = "tasks/train"
HELDOUT_KEY = "tasks/heldout"
MIDTRAIN_KEY = "midtrain/tokens"
MIDTRAIN_HELDOUT_KEY = "midtrain/heldout"
OBJECT_KEYS = (TOKENIZER_KEY, TRAIN_KEY, HELDOUT_KEY, MIDTRAIN_KEY, MIDTRAIN_HELDOUT_KEY)

T = TypeVar("T")


class PreparationStoppedError(PenstockError, RuntimeError):
    """Nobody waits for the objects any more."""


class PrepareConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of everything."""

    selection: Selection = Selection()
    """Categories and families of all tasks, trained, held out and demonstrated."""
    tasks: str = ""
    """Folder of Harbor tasks (`penstock tasks make`, or others'), in place of the ladder's.
    Demonstrations are the ladder's all the same."""
    egress_addresses: bool = False
    """Whether these tasks' rules may name addresses; as `sandbox.egress_addresses`."""
    num_train_tasks: PositiveInt = 1024
    num_heldout_tasks: PositiveInt = 128
    num_demonstrations: PositiveInt = 8000
    """Episodes of mid-training, each on a task of its own."""
    code_tokens: PositiveInt = 500_000
    """Standard-library tokens of mid-training."""
    code_weight: float = 0.3
    """Of a code token as a target, next to 1 for what the demonstrating actor says."""
    context_weight: float = 0.1
    """Of a token that the demonstrating actor reads."""
    drill_tokens: int = 160_000
    """Tokens of rows said twice, from which copying is learned."""
    drill_half_tokens: int = 20
    piece_tokens: int = 256
    habits: Habits = Habits()
    limits: Limits = LIMITS
    """Of an episode of any of these tasks."""
    harness: str = HARNESS_VERSION
    """Version of the tools that demonstrations use; by default the one of `pacer.harness`."""


async def prepare(
    config: PrepareConfig,
    policy: PolicyConfig,
    store: ObjectStore,
    seed: int,
    say: Callable[[str], None],
) -> None:
    """Put all objects that are not there yet; cancelled, it ends soon, and has put none.

    Args:
        say: told in words what is being done.

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
    return _task_objects(config, seed, stopped) | _midtrain_objects(config, policy, seed, stopped)


def _until(stopped: threading.Event, items: Iterable[T]) -> Iterator[T]:
    """Iterate until the event is set."""
    for item in items:
        if stopped.is_set():
            raise PreparationStoppedError("the preparation was stopped")
        yield item


def _task_objects(config: PrepareConfig, seed: int, stopped: threading.Event) -> dict[str, bytes]:
    if config.tasks:
        return _harbor_objects(Path(config.tasks), egress_addresses=config.egress_addresses)
    objects = {}
    for key, split, num in (
        (TRAIN_KEY, Split.TRAIN, config.num_train_tasks),
        (HELDOUT_KEY, Split.HELDOUT, config.num_heldout_tasks),
    ):
        rng = random.Random(f"{split}/{seed}")
        source = LadderSource(split, num, config.selection, rng, split.value)
        drawn = to_task_set(_until(stopped, source.candidates()))
        tasks = [msgspec.structs.replace(task, limits=config.limits) for task in drawn.tasks]
        objects[key] = msgspec.msgpack.encode(msgspec.structs.replace(drawn, tasks=tasks))
    return objects


def _harbor_objects(root: Path, *, egress_addresses: bool) -> dict[str, bytes]:
    candidates = read_harbor_set(root, egress_addresses=egress_addresses)
    objects: dict[str, bytes] = {}
    for key, split in ((TRAIN_KEY, Split.TRAIN), (HELDOUT_KEY, Split.HELDOUT)):
        chosen = [one for one in candidates if one.task.split is split]
        if not chosen:
            words = f'[metadata.penstock] split = "{split}" makes one of a task'
            raise MalformedTaskError(f"{root}: expected tasks of both splits; {words}")
        objects[key] = msgspec.msgpack.encode(to_task_set(chosen))
    return objects


def _midtrain_objects(
    config: PrepareConfig, policy: PolicyConfig, seed: int, stopped: threading.Event
) -> dict[str, bytes]:
    from penstock.actors.policy.tokenizer import train_tokenizer
    from penstock.actors.trainer.midtraining.corpus import encode_corpus
    from penstock.infra.run.midtrain_data import (
        CorpusBuilder,
        attempts,
        standard_library,
        transcript_text,
    )

    rng = random.Random(f"midtrain/{seed}")
    code, heldout_code = standard_library(rng)
    tasks = draw_repositories(Split.TRAIN, config.num_demonstrations, config.selection, rng, "demo")
    transcripts = attempts(_until(stopped, tasks), config.habits, rng, config.harness)
    tokenizer = train_tokenizer(
        [*(transcript_text(one) for one in transcripts[:2000]), *code[:40]], policy.vocab_size
    )
    train, heldout = CorpusBuilder(tokenizer), CorpusBuilder(tokenizer)
    num_code = 0
    for text in _until(stopped, code):
        num_code += train.add_code(text, config.code_weight, config.piece_tokens)
        if num_code >= config.code_tokens:
            break
    drills = np.random.default_rng([seed, config.drill_tokens])
    train.add_drills(drills, config.drill_tokens, config.drill_half_tokens)
    for transcript in _until(stopped, transcripts):
        train.add_transcript(transcript, config.context_weight)
    for text in _until(stopped, heldout_code):
        heldout.add_code(text, 1.0, config.piece_tokens)
    return {
        TOKENIZER_KEY: _tokenizer_bytes(tokenizer),
        MIDTRAIN_KEY: encode_corpus(train.build()),
        MIDTRAIN_HELDOUT_KEY: encode_corpus(heldout.build()),
    }


def _tokenizer_bytes(tokenizer: "Tokenizer") -> bytes:  # noqa: F821
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / TOKENIZER_KEY
        tokenizer.save(path)
        return path.read_bytes()
