"""A run in which too many rollouts fail for want of machines or judges ends, and says why."""

import msgspec
import pytest
from tests.sim.trainer.test_trainer_run import ledger_of, replayed

from penstock.actors.monitor.fold import RunFold
from penstock.actors.trainer.actor import NewestEnds
from penstock.actors.trainer.config import TrainerConfig
from penstock.infra.commands.status import render
from penstock.messages.control import RunFinished
from penstock.messages.errors import ConfigError
from penstock.messages.reward import Outcome, Verdict
from penstock.messages.rollout import EpisodeEnd, RolloutFinished
from penstock.messages.training import StepCompleted

FAILED = EpisodeEnd.INFRASTRUCTURE_ERROR
DEFAULT = TrainerConfig().infrastructure_share_max
SETTINGS = {"infrastructure_share_max": DEFAULT, "infrastructure_num_min": 20, "steps_max": 30}


def break_from(world, index_first: int, share: float) -> None:
    """Let groups from an index on end for want of machines, and no others."""
    draw = world._rollout

    def rollout(index, member, version):
        fails = index >= index_first and world.random.random() < share
        return [changed(event, member, fails) for event in draw(index, member, version)]

    def changed(event, member, fails):
        if isinstance(event, RolloutFinished) and fails:
            return msgspec.structs.replace(event, end=FAILED)
        if not isinstance(event, Verdict):
            return event
        outcome = Outcome.SOLVED if member else Outcome.FAILED
        outcome = Outcome.INFRASTRUCTURE_ERROR if fails else outcome
        reward = float(outcome is Outcome.SOLVED)
        components = {"tests": reward}
        return msgspec.structs.replace(event, outcome=outcome, reward=reward, components=components)

    world._rollout = rollout


@pytest.mark.parametrize("kill_every", [0, 3])
async def test_a_run_halts_with_the_reason(make_world, kill_every) -> None:
    world = make_world(**SETTINGS)
    break_from(world, 10, 0.6)
    if kill_every:
        world.log.num_until_kill = kill_every
    await world.run()
    [end] = world.log.of(RunFinished)
    assert end.is_failure and 0 < end.step < 30
    assert end.reason.startswith("infrastructure: of the newest ")
    assert "trainer.infrastructure_share_max is 0.2" in end.reason
    assert [step.step for step in world.log.of(StepCompleted)] == list(range(1, end.step + 1))
    assert ledger_of(world).violations == []
    assert (await replayed(world)).identical
    fold = RunFold()
    async for delivery in world.log.follow():
        fold.apply(delivery.event, delivery.stored_at)
    state = fold.state(fold.last_at)
    assert state.run.is_given_up and state.run.finish_reason == end.reason
    assert any(line.level == "error" and end.reason[:60] in line.text for line in state.log)
    render(state)


async def test_some_failures_are_no_reason(make_world) -> None:
    world = make_world(**{**SETTINGS, "steps_max": 10})
    break_from(world, 0, 0.1)
    await world.run()
    assert world.log.of(RunFinished) == [RunFinished(reason="steps_max", step=10)]


def finished(name: str, end: EpisodeEnd = EpisodeEnd.FINISHED) -> RolloutFinished:
    fields = {field: None for field in RolloutFinished.__struct_fields__}
    return RolloutFinished(**{**fields, "rollout_id": name, "end": end})


def verdict(name: str, outcome: Outcome) -> Verdict:
    fields = {field: None for field in Verdict.__struct_fields__}
    return Verdict(**{**fields, "rollout_id": name, "outcome": outcome})


def test_each_rollout_counts_once_whatever_comes_first() -> None:
    ends = NewestEnds(0.2, window=10, num_min=5)
    for index in range(4):
        ends.add_verdict(verdict(f"r{index}", Outcome.JUDGE_ERROR))
        ends.add_rollout(finished(f"r{index}"))
        ends.add_rollout(finished(f"r{index}", FAILED))
    assert ends.fault == "", "four are fewer than five"
    ends.add_rollout(finished("r4"))
    assert "of the newest 5 rollouts, 0 ended because machines failed, 4 could not" in ends.fault


def test_verdicts_that_are_read_before_all_ends_are_no_failures_alone() -> None:
    """As after a restart: the streams of a log are read side by side."""
    ends = NewestEnds(0.2, window=10, num_min=5)
    for index in range(100):
        outcome = Outcome.FAILED if index % 10 else Outcome.INFRASTRUCTURE_ERROR
        ends.add_verdict(verdict(f"r{index}", outcome))
        assert ends.fault == "", index


def test_the_share_is_of_the_newest_and_must_be_exceeded() -> None:
    ends = NewestEnds(0.2, window=10, num_min=10)
    for index in range(2):
        ends.add_rollout(finished(f"bad{index}", FAILED))
    for index in range(8):
        ends.add_rollout(finished(f"good{index}", EpisodeEnd.TIME_LIMIT))
    assert ends.fault == "", "2 of 10 are not more than 20%"
    ends.add_rollout(finished("cancelled", EpisodeEnd.CANCELLED))
    ends.add_rollout(finished("bad2", FAILED))
    ends.add_rollout(finished("bad3", FAILED))
    assert ends.fault == "", "the oldest failures have left the window"
    ends.add_rollout(finished("bad4", FAILED))
    assert "3 ended because machines failed" in ends.fault


def test_the_minimum_fits_the_window() -> None:
    with pytest.raises(ConfigError, match=r"infrastructure_num_min: expected at most .* 8, got 9"):
        TrainerConfig(infrastructure_window=8, infrastructure_num_min=9)
