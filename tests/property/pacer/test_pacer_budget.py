"""The staleness bound holds whatever comes in whatever order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.actors.pacer.actor import eval_commands, group_commands
from penstock.actors.pacer.config import PacerConfig
from penstock.actors.pacer.staleness_budget import Budget
from penstock.messages.reward import EvalRequested
from penstock.messages.task import Split, Task

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("version"), st.integers(0, 12)),
        st.tuples(st.just("discard"), st.integers(0, 5)),
        st.tuples(st.just("grant"), st.integers(0, 40)),
        st.tuples(st.just("close"), st.just(0)),
    ),
    max_size=40,
)


def make_task(task_id: str, category: str = "easy") -> Task:
    return Task(
        task_id=task_id, category=category, split=Split.TRAIN, instruction=task_id, files={}
    )


@given(EVENTS, st.integers(1, 4), st.integers(0, 3), st.integers(1, 10))
def test_bound_is_never_broken(
    events: list[tuple[str, int]], per_batch: int, staleness_max: int, steps_max: int
) -> None:
    budget = Budget(groups_per_batch=per_batch, staleness_max=staleness_max, steps_max=steps_max)
    version, discarded, is_closed = -1, 0, False
    for kind, value in events:
        granted_before = budget.num_granted
        if kind == "version":
            version = max(version, value)
            budget = budget.with_version(value)
        elif kind == "discard":
            discarded += value
            budget = budget.with_batch(version, per_batch, value)
        elif kind == "close":
            is_closed, budget = True, budget.closed()
        else:
            budget = budget.with_granted(min(value, budget.num_grantable))
        allowed = (staleness_max + version + 1) * per_batch + discarded if version >= 0 else 0
        assert budget.num_granted <= allowed
        assert budget.num_granted <= steps_max * per_batch + discarded
        assert not is_closed or budget.num_granted == granted_before


@given(st.integers(1, 4), st.integers(0, 3), st.lists(st.integers(0, 3), max_size=12))
def test_no_group_is_trained_staler_than_allowed(
    per_batch: int, staleness_max: int, discards: list[int]
) -> None:
    """Grant all there is at each version, train in order: count the versions in between."""
    budget = Budget(groups_per_batch=per_batch, staleness_max=staleness_max, steps_max=100)
    waiting: list[int] = []  # the version at which each group in the pool was granted
    for version, num_discarded in enumerate(discards):
        budget = budget.with_version(version)
        waiting += [version] * budget.num_grantable
        budget = budget.with_granted(budget.num_grantable)
        dropped = min(num_discarded, len(waiting) - per_batch)
        del waiting[:dropped]
        batch, waiting = waiting[:per_batch], waiting[per_batch:]
        assert len(batch) == per_batch
        assert all(version - granted_at <= staleness_max for granted_at in batch)
        budget = budget.with_batch(version, per_batch, dropped)


def test_traced_example() -> None:
    budget = Budget(groups_per_batch=2, staleness_max=1, steps_max=100)
    assert budget.num_grantable == 0
    budget = budget.with_version(0)
    assert budget.num_allowed == 4
    budget = budget.with_granted(4).with_batch(0, 2, 1)
    assert (budget.num_allowed, budget.num_grantable) == (5, 1)
    assert budget.with_version(1).num_allowed == 7
    assert budget.with_version(1).with_version(0).policy_version == 1


def test_without_staleness_discarded_groups_are_made_up_for_with_the_next_version() -> None:
    budget = Budget(groups_per_batch=3, staleness_max=0, steps_max=100).with_version(0)
    budget = budget.with_granted(3).with_batch(0, 2, 1)
    assert (budget.num_discarded, budget.num_grantable) == (1, 0)
    budget = budget.with_version(1)
    assert budget.num_grantable == 4
    budget = budget.with_granted(4).with_batch(1, 2, 2)
    assert budget.num_grantable == 0
    assert budget.with_version(2).num_grantable == 5


def test_granting_beyond_the_bound_is_refused() -> None:
    with pytest.raises(AssertionError, match="grantable"):
        Budget(groups_per_batch=2, staleness_max=0, steps_max=5).with_version(0).with_granted(3)


def test_synchronous_grants_one_batch_at_a_time() -> None:
    config = PacerConfig(staleness_max=3, synchronous=True)
    assert config.staleness_granted == 0


def test_commands_have_the_same_ids_and_seeds_each_time() -> None:
    config = PacerConfig(group_size=3, seed=7)
    group = group_commands(config, 5, make_task("t"), policy_version=2)
    assert group == group_commands(config, 5, make_task("t"), policy_version=2)
    assert [command.rollout_id for command in group] == ["g5-m0", "g5-m1", "g5-m2"]
    assert len({command.sampling.seed for command in group}) == 3
    assert {command.policy_version for command in group} == {2}


def test_evaluation_spreads_over_the_categories() -> None:
    tasks = [make_task(f"t{n}", "ab"[n % 2]) for n in range(10)]
    request = EvalRequested(eval_id="v0", policy_version=0, num_tasks=5)
    commands = eval_commands(PacerConfig(), request, tasks)
    assert [command.task.task_id for command in commands] == ["t0", "t4", "t8", "t3", "t7"]
    assert [command.rollout_id for command in commands] == [f"ev0-{n}" for n in range(5)]
    assert {(command.group_id, command.group_size) for command in commands} == {("v0", 5)}
