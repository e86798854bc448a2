"""Episodes whose texts are hostile, and what a run's store has of them."""

from collections.abc import Iterator

import msgspec
import numpy as np

from penstock.actors.policy.tokenizer import TOKENIZER_KEY, Tokenizer, train_tokenizer
from penstock.envs.tasks.storage import tasks_key
from penstock.kernels.arrays import to_array
from penstock.messages.base import Event
from penstock.messages.bus import ObjectStore
from penstock.messages.reward import Outcome, Verdict
from penstock.messages.rollout import (
    EpisodeEnd,
    EpisodeFiles,
    RolloutFinished,
    StopReason,
    Turn,
    TurnSampled,
    VersionSpan,
)
from penstock.messages.task import Purpose, Split, Task
from penstock.messages.training import BatchManifest, GroupEntry, SampleEntry

HOSTILE = "</script><script>alert(1)</script>\x1b[2J\u202e" + "x" * 200
TASK = Task(
    task_id="t", category="operator", split=Split.TRAIN, instruction=HOSTILE, files={"a.py": "a\n"}
)
TOKENIZER = train_tokenizer([HOSTILE, "def f(x): return x"], vocab_size=400)


def turn(said: str, context: str) -> Turn:
    ids = np.array(TOKENIZER.encode(said), np.int32)
    return Turn(
        context_ids=to_array(np.array(TOKENIZER.encode(context), np.int32)),
        token_ids=to_array(ids),
        behavior_logprobs=to_array(np.full(ids.size, -0.5, np.float32)),
        version_spans=[VersionSpan(policy_version=3, num_tokens=ids.size)],
        stop_reason=StopReason.STOP,
    )


def episode(
    name: str, group: str = "g0", outcome: Outcome = Outcome.SOLVED, index: int = 0
) -> Iterator[Event]:
    said = [turn("read é", HOSTILE), turn("edit", "result")]
    common = {"rollout_id": name, "group_id": group, "purpose": Purpose.TRAIN}
    yield from (TurnSampled(**common, turn_index=i, turn=one) for i, one in enumerate(said))
    yield RolloutFinished(
        **common,
        group_index=index,
        group_size=2,
        member=0,
        task_id="t",
        category="operator",
        end=EpisodeEnd.FINISHED,
        turns=[one.summary for one in said],
        files=EpisodeFiles(changed={"a.py": b"b\n", "c.bin": b"\xff"}),
    )
    yield Verdict(
        **common,
        group_index=index,
        judge="hidden_tests",
        judge_version="1",
        outcome=outcome,
        reward=1.0,
        num_tests=2,
        num_tests_passed=1,
        detail=HOSTILE,
    )


def manifest(*names: str) -> BatchManifest:
    samples = [
        SampleEntry(
            rollout_id=name, outcome=Outcome.SOLVED, reward=1.0, advantage=0.5, version_spans=[]
        )
        for name in names
    ]
    group = GroupEntry(group_id="g0", group_index=0, task_id="t", samples=samples)
    return BatchManifest(step=7, policy_version=6, groups=[group])


async def with_objects(
    store: ObjectStore, tokenizer: Tokenizer = TOKENIZER, task: Task = TASK
) -> None:
    await store.put(TOKENIZER_KEY, tokenizer.to_json().encode())
    await store.put(tasks_key(Split.TRAIN), msgspec.msgpack.encode([task]))
