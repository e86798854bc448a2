"""A batch whose gradient is no number is a recorded step, not the end of the run."""

import math

import pytest
from tests.sim.trainer.test_trainer_run import ledger_of, replayed

from penstock.messages.control import RunFinished
from penstock.messages.reward import Outcome, Verdict
from penstock.messages.training import BatchManifest, CheckpointSaved, StepCompleted
from penstock.messages.weights import WeightsPublished

REWARD = 3e38
"""Finite, in float32 too; times the log-probability of a token it is not."""


def poison(world, indexes) -> None:
    """Let groups of these indexes have members of such rewards."""
    draw = world._rollout

    def rollout(index, member, version):
        events = draw(index, member, version)
        if index not in indexes:
            return events
        verdict = events[-1]
        assert isinstance(verdict, Verdict)
        reward = REWARD if member == 0 else 0.0
        fields = {f: getattr(verdict, f) for f in verdict.__struct_fields__}
        outcome = Outcome.SOLVED if member == 0 else Outcome.FAILED
        fields |= {"outcome": outcome, "reward": reward, "components": {"tests": reward}}
        return [*events[:-1], Verdict(**fields)]

    world._rollout = rollout


def check_skipped(world) -> list[StepCompleted]:
    """Assert that skipped steps changed nothing and were accounted for; return them."""
    steps = world.log.of(StepCompleted)
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    assert [v.policy_version for v in world.log.of(WeightsPublished)] == list(range(len(steps) + 1))
    for before, step in zip([None, *steps], steps, strict=False):
        if step.skipped and before is not None:
            assert before.weights_digest == step.weights_digest
            assert before.optimizer_digest == step.optimizer_digest
        assert all(math.isfinite(value) for value in step.metrics.values())
    ledger = ledger_of(world)
    for step in steps:
        ledger.add_step(step)
    assert ledger.violations == []
    skipped = [step for step in steps if step.skipped]
    settled = {
        sample.rollout_id: sum(span.num_tokens for span in sample.version_spans)
        for manifest in world.log.of(BatchManifest)
        if manifest.step in {step.step for step in skipped}
        for sample in [*(s for group in manifest.groups for s in group.samples), *manifest.live]
        if sample.outcome.is_trained
    }
    assert ledger.totals().skipped == sum(settled.values()) > 0
    return skipped


@pytest.mark.parametrize("kill_every", [0, 1, 4])
async def test_a_skipped_step_makes_a_version_and_replays_so(make_world, kill_every) -> None:
    world = make_world(steps_max=6)
    poison(world, {4})
    if kill_every:
        world.log.num_until_kill = kill_every
    await world.run()
    [step] = check_skipped(world)
    assert "nan" in step.skipped or "inf" in step.skipped
    assert (step.num_skipped, step.staleness_tokens) == (1, {})
    assert world.log.of(RunFinished) == [RunFinished(reason="steps_max", step=6)]
    report = await replayed(world)
    assert (report.first_difference, report.identical, report.steps) == ("", True, 6)


async def test_too_many_in_a_row_end_the_run_with_their_reason(make_world) -> None:
    world = make_world(steps_max=20, skipped_steps_max=3)
    poison(world, range(4, 100))
    await world.run()
    skipped = check_skipped(world)
    assert [step.num_skipped for step in skipped] == [1, 2, 3]
    [end] = world.log.of(RunFinished)
    assert end.is_failure
    assert end.step == skipped[-1].step
    assert end.reason == f"3 steps in a row were skipped: {skipped[-1].skipped}"
    assert world.log.of(CheckpointSaved)[-1].step == end.step
    trainer = await world.run_once()  # a resumed run stays where it ended
    assert trainer._phase.is_finished
    assert world.log.of(RunFinished) == [end]
    assert (await replayed(world)).identical
