"""The judge by hidden tests: grades each step of a task by its tests, on the files it left.

```
 EpisodeStepEnded 0, 1, .. ─▶ grade ─▶ 1, 0.5, ..  ─▶ mean, or the last one ─▶ one verdict
 RolloutFinished           ─▶ grade ─▶ 0           ─┘
```
Each finding is stored (`StepGraded`), so that a restarted judge grades no step twice. If a step
misses its minimum reward, later steps do not count. Steps for which the episode had no turn left
have the reward 0.

Source: `MultiStepTrial` of Harbor 0.25.0.
"""

import math
from collections.abc import Sequence

import msgspec

from penstock.actors.judge.audit import most_decisive
from penstock.actors.judge.config import JudgeConfig
from penstock.actors.judge.hidden_tests import OneStepJudge, SameFilesJudge, weigh
from penstock.actors.judge.reward import Findings
from penstock.actors.runtime.context import Context
from penstock.envs.tasks.storage import GradedTask
from penstock.messages.episode import EpisodeStepEnded
from penstock.messages.errors import CodecError
from penstock.messages.reading.trajectories import Trajectory, load_files
from penstock.messages.reward import CheatFinding, Outcome, StepGraded
from penstock.messages.task import HiddenTests

_GRADED = frozenset({Outcome.SOLVED, Outcome.FAILED})
_SAME = [name for name in Findings.__struct_fields__ if name in StepGraded.__struct_fields__]
"""Fields that `Findings` and `StepGraded` share; `cheats` are `findings` in the event."""


class HiddenTestsJudge:
    """Solved if and only if the hidden tests of every step pass, each in a fresh machine.

    Custom judges that need the hidden tests create one from their settings.
    """

    name = OneStepJudge.name
    version = OneStepJudge.version

    def __init__(self, config: JudgeConfig) -> None:
        self._judge = SameFilesJudge(OneStepJudge(config))

    async def judge(self, rollout: Trajectory, task: GradedTask, ctx: Context) -> Findings:
        """Grade one rollout."""
        if not task.task.steps:
            return await self._judge.judge(rollout, task, ctx)
        ends = rollout.finished.step_ends
        if fault := _fault(len(ends), task):
            return Findings(outcome=Outcome.JUDGE_ERROR, detail=fault)
        found: list[Findings] = []
        # A step without a turn was never begun: it scores 0 without a machine.
        is_begun = not ends or ends[-1] + 1 < len(rollout.finished.turns)
        for step in range(len(ends) + is_begun):
            graded = task.at_step(step)
            one = await self._grade(rollout, graded, ctx)
            if one.outcome not in _GRADED:
                text, cheats = f"step {step + 1}: {one.detail}", _cheats([*found, one])
                return msgspec.structs.replace(one, detail=text, cheats=cheats)
            found.append(one)
            least = graded.hidden.min_reward
            if least is not None and _reward(one) < least:
                return _joined(found, task.hidden, len(found))
        return _joined(found, task.hidden, len(task.task.steps) + 1)

    async def _grade(self, rollout: Trajectory, task: GradedTask, ctx: Context) -> Findings:
        rollout_id = rollout.finished.rollout_id
        known = await ctx.last(StepGraded, f"{rollout_id}.{task.step}")
        # Another version may grade the same files differently, so its findings do not count.
        if known is not None and known.judge_version == self.version:
            return _read(known)
        try:
            left = await _left_by(rollout, task.step, ctx)
        except CodecError as error:
            return Findings(outcome=Outcome.JUDGE_ERROR, detail=str(error))
        found = await self._judge.judge(left, task, ctx)
        if found.outcome in _GRADED:
            await ctx.publish(_written(found, rollout_id, task.step, self.version))
        return found


def _written(found: Findings, rollout_id: str, step: int, judge_version: str) -> StepGraded:
    return StepGraded(
        rollout_id=rollout_id,
        step=step,
        judge_version=judge_version,
        findings=found.cheats,
        **{name: getattr(found, name) for name in _SAME},
    )


def _read(graded: StepGraded) -> Findings:
    return Findings(cheats=graded.findings, **{name: getattr(graded, name) for name in _SAME})


def _fault(num_ended: int, task: GradedTask) -> str:
    """Return why the steps of a task and of its rollout do not match, or an empty string."""
    num_later, task_id = len(task.task.steps), task.task.task_id
    if len(task.hidden.steps) != num_later:
        graded = len(task.hidden.steps) + 1
        return f"task {task_id}: expected hidden tests of {num_later + 1} steps, got {graded}"
    if num_ended > num_later:
        return f"{num_ended} steps ended, but the task has {num_later + 1}"
    return ""


async def _left_by(rollout: Trajectory, step: int, ctx: Context) -> Trajectory:
    """Return the rollout as it was at the end of a step.

    Raises:
        CodecError: The log has no such end, or its files are damaged.
        StoreUnreachableError: The store did not answer.

    """
    finished = rollout.finished
    if step == len(finished.step_ends):
        return rollout
    key = finished.turn_key(finished.step_ends[step])
    ended = await ctx.last(EpisodeStepEnded, key)
    if ended is None or ended.step != step:
        raise CodecError(f"step end {key}: the rollout names it, but the log does not have it")
    files = await load_files(ctx.store, ended.files)
    finished = msgspec.structs.replace(finished, deleted=ended.deleted)
    return msgspec.structs.replace(
        rollout, finished=finished, files=files.changed, states=files.states
    )


def _reward(found: Findings) -> float:
    return 1.0 if found.outcome is Outcome.SOLVED else found.score or 0.0


def _joined(found: Sequence[Findings], hidden: HiddenTests, num_steps: int) -> Findings:
    """Combine the findings of steps.

    Args:
        found: Findings of the graded steps.
        hidden: Whether the last step or the mean decides.
        num_steps: Number of steps that count; those beyond `found` have the reward 0.

    """
    rewards = [*map(_reward, found), *[0.0] * (num_steps - len(found))]
    value = rewards[-1] if hidden.is_last_step_all else sum(rewards) / num_steps
    is_whole = math.isclose(value, 1.0, abs_tol=1e-9)
    shown = "; ".join(f"step {n}: {one.detail}" for n, one in enumerate(found, 1) if one.detail)
    joined = Findings(
        outcome=Outcome.SOLVED if is_whole else Outcome.FAILED,
        score=value if 0.0 < value < 1.0 and not is_whole else None,
        num_tests_passed=sum(one.outcome is Outcome.SOLVED for one in found),
        num_tests=num_steps,
        sandbox=found[-1].sandbox,
        detail=shown,
    )
    return weigh(joined, _cheats(found))


def _cheats(found: Sequence[Findings]) -> list[CheatFinding]:
    # Of all steps: a later step may have deleted the file that shows a sign.
    unique = {(one.kind, one.where): one for each in found for one in each.cheats}
    return most_decisive(unique.values())
