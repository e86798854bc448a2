"""A task whose rollouts break process after process is granted no more, and all can see why."""

import contextlib

import pytest
from tests.sim.rollout.conftest import World, simulate, tokenizer

from penstock.actors.monitor.fold import RunFold
from penstock.actors.runtime.in_progress import NUM_SLOTS, InProgress, NotedItem
from penstock.infra.commands.status import render
from penstock.infra.run.charges import Attribution, Death, DeathCause
from penstock.messages.control import ItemCharged, ItemQuarantined
from penstock.messages.training import MidtrainCompleted, StepCompleted

__all__ = ["simulate", "tokenizer"]
MIDTRAIN = MidtrainCompleted(
    num_tokens=0, loss_first=0.0, loss_last=0.0, heldout_loss=0.0, heldout_perplexity=1.0,
    weights_digest="", wall_s=0.0,
)  # fmt: skip


def quarantined(rollout_id: str, task_id: str, role: str = "rollout_worker.StartRollout"):
    item = f"{role}.{rollout_id}"
    return ItemQuarantined(item=item, cause="ended by signal 11", task_id=task_id)


def test_two_quarantined_rollouts_end_a_task(simulate) -> None:
    async def scenario(world: World) -> None:
        await world.put_tasks(3, 3)
        bad, once = "train-0", "train-1"
        await world.publish(
            quarantined("g0-m0", bad),
            quarantined("g0-m0", bad, "judge.RolloutFinished"),  # the same rollout
            quarantined("g1-m3", once),
            quarantined("g7-m1", bad),
        )
        world.host(world.policy)
        world.host_pacer(await_baseline=False, groups_per_batch=40, group_size=1, steps_max=1)
        await world.sleep(5.0)
        await world.publish(MIDTRAIN)
        commands = await world.wait_for_commands(40)
        granted = [command.task.task_id for command in commands]
        assert set(granted) == {once, "train-2"}
        [task] = [e for e in await world.read(ItemQuarantined) if e.item.startswith("pacer.")]
        assert (task.item, task.task_id) == (f"pacer.Task.{bad}", bad)
        assert "g0-m0, g7-m1" in task.cause

    simulate(scenario)


def test_charges_are_in_the_run_s_view() -> None:
    fold = RunFold()
    for number, is_proven in ((1, False), (2, True), (3, True)):
        charged = ItemCharged(
            item="judge.RolloutFinished.g3-m2", number=number, cause="[red]x", is_proven=is_proven
        )
        fold.apply(charged, 10.0 + number)
    fold.apply(quarantined("g3-m2", "t3"), 20.0)
    state = fold.state(30.0)
    view = state.charges
    assert (view.num_proven, view.num_suspected, view.num_quarantined) == (2, 1, 1)
    [one] = view.quarantined
    assert (one.task_id, one.cause, one.at) == ("t3", "ended by signal 11", 20.0)
    levels = [line.level for line in state.log]
    assert levels == ["warn", "warn", "warn", "error"]
    assert render(state) is not None


def test_a_skipped_step_is_an_error_in_the_log_and_counted() -> None:
    fold = RunFold()
    step = StepCompleted(
        step=3, policy_version=3, weights_digest="a", optimizer_digest="b", metrics={},
        skipped="the loss is nan", num_skipped=1,
    )  # fmt: skip
    fold.apply(step, 1.0)
    state = fold.state(2.0)
    assert state.training.num_skipped == 1
    assert (state.log[-1].level, "the loss is nan" in state.log[-1].text) == ("error", True)


@pytest.mark.parametrize("names", [["a" * 2000], [f"w.Generate.{n}" for n in range(NUM_SLOTS)]])
def test_what_is_not_noted_has_no_neighbor_charged(names):
    in_progress, attribution = InProgress(), Attribution(crashes_max=10, period_s=60.0)
    with contextlib.ExitStack() as stack:
        for name in ["generator.Generate.innocent", *names]:
            stack.enter_context(in_progress.noted(name))
        items = tuple(in_progress.current())
        for at in (10.0, 20.0):
            death = Death(process="g", at=at, cause=DeathCause.CRASHED, words="x", items=items)
            attribution.note(death)
            assert attribution.judge(death).events == []
    assert in_progress.current() == []


def test_a_task_with_the_longest_name_is_charged():
    item, task_id = f"rollout_worker.StartRollout.{'a' * 300}", "a" * 200
    in_progress = InProgress()
    with in_progress.noted(item, task_id):
        assert in_progress.current() == [NotedItem(item, task_id)]
