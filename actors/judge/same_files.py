"""Grades every distinct result once: rollouts of a group often leave the very same files behind.

```
 8 rollouts of a task ──▶ 3 distinct results ──▶ 3 fresh machines ──▶ 8 verdicts
```
A verdict that shares another's grading names it, and no machine: it had none of its own. What the
episode did on the way is its own affair: signs of cheating are never shared.
Tests that give two answers for the same files are flaky, and the gates keep such tasks out. A
failure of a machine says nothing of the files and is not shared.
"""

import asyncio
import hashlib
from collections import OrderedDict
from weakref import WeakValueDictionary

import msgspec

from penstock.actors.judge.audit import audit
from penstock.actors.judge.hidden_tests import HiddenTestsJudge, weigh
from penstock.actors.judge.reward import Findings
from penstock.actors.judge.tasks import GradedTask
from penstock.actors.runtime.context import Context
from penstock.messages.reward import Outcome
from penstock.messages.rollout import RolloutFinished

NUM_RESULTS_MAX = 4096
"""Remembered; the oldest is forgotten first, and graded again if it comes back."""
_SHARED = frozenset({Outcome.SOLVED, Outcome.FAILED})


class SameFilesJudge:
    """Asks another judge once for each set of files that a task was left with."""

    def __init__(self, judge: HiddenTestsJudge) -> None:
        """Take the judge to ask."""
        self.name, self.version = judge.name, judge.version
        self._judge = judge
        self._found: OrderedDict[bytes, tuple[str, Findings]] = OrderedDict()
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def judge(self, rollout: RolloutFinished, task: GradedTask, ctx: Context) -> Findings:
        """Grade one rollout, or say what was found about another one with the same files.

        One that waits for another's grading waits as long as that may take, which is bounded.
        """
        key = result_digest(rollout)
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key in self._found:
                first_id, findings = self._found[key]
                detail = f"same files as {first_id}"
                shared = msgspec.structs.replace(findings, detail=detail, sandbox=None)
                return weigh(shared, audit(rollout, task))
            findings = await self._judge.judge(rollout, task, ctx)
            if findings.outcome in _SHARED:
                self._remember(key, rollout.rollout_id, findings)
            return findings

    def _remember(self, key: bytes, rollout_id: str, findings: Findings) -> None:
        self._found[key] = (rollout_id, findings)
        if len(self._found) > NUM_RESULTS_MAX:
            self._found.popitem(last=False)


def result_digest(rollout: RolloutFinished) -> bytes:
    """Digest a task and what the episode did to its files: 16 bytes."""
    result = (
        rollout.purpose,
        rollout.task_id,
        sorted(rollout.files.items()),
        sorted(rollout.deleted),
    )
    return hashlib.blake2b(msgspec.msgpack.encode(result), digest_size=16).digest()
