"""Which tasks groups attempt: fresh ones first, then uncertain ones, the same after a restart."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.actors.pacer.config import PacerConfig
from penstock.actors.pacer.curriculum import Curriculum, TasksExhaustedError
from penstock.messages.errors import ConfigError
from penstock.messages.task import GroupGranted, Split, Task
from penstock.messages.training import GroupEntry


def make_task(task_id: str, category: str = "easy", source: str = "") -> Task:
    return Task(
        task_id=task_id, category=category, source=source, split=Split.TRAIN,
        instruction=task_id, files={},
    )  # fmt: skip


def make(tasks, source_weights=None, **config) -> Curriculum:
    return Curriculum(tasks, PacerConfig(**config), source_weights or {})


def settled(index: int, task_id: str, num_solved: int, num_judged: int = 8) -> GroupEntry:
    return GroupEntry(
        group_id=f"g{index}", group_index=index, task_id=task_id, samples=[],
        num_judged=num_judged, num_solved=num_solved,
    )  # fmt: skip


def grant(curriculum: Curriculum, index: int, without=()) -> GroupGranted:
    granted = curriculum.pick(index, without)
    curriculum.note(granted)
    return granted


def test_no_task_is_attempted_twice_while_there_are_fresh_ones() -> None:
    """Drawing with replacement reuses tasks: 28% of about 700 groups over 1,024 of them."""
    tasks = [make_task(f"t{n}", "abcd"[n % 4]) for n in range(256)]
    curriculum = make(tasks)
    granted = [grant(curriculum, index) for index in range(256)]
    assert len({one.task_id for one in granted}) == 256
    assert [one.num_fresh for one in granted] == list(range(255, -1, -1))
    assert {one.attempt for one in granted} == {0}
    again = grant(curriculum, 256)
    assert (again.attempt, again.num_fresh) == (1, 0)


@settings(max_examples=60)
@given(
    st.integers(0, 9),
    st.integers(2, 12),
    st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=60),
    st.sampled_from([0.0, 0.3]),
)
def test_grants_and_manifests_alone_decide(seed, num_tasks, moves, revisit_share) -> None:
    """Fresh ones come first, the state is bounded, and a restart picks what would have been."""
    tasks = [make_task(f"t{n}", "ab"[n % 2]) for n in range(num_tasks)]
    config = {"seed": seed, "revisit_share": revisit_share}
    live, log, opened, attempted_ids = make(tasks, **config), [], [], set()
    for step, (settles, num_solved) in enumerate(moves):
        if settles and opened:
            one = opened.pop(0)
            entry = settled(one.group_index, one.task_id, num_solved)
            log.append((entry, step))
            live.settle(entry, step, differs=0 < num_solved < 8)
        else:
            one = grant(live, live.num_noted)
            assert one.attempt == 0 or len(attempted_ids) == num_tasks or revisit_share
            attempted_ids.add(one.task_id)
            log.append((one, step))
            opened.append(one)
    again = make(tasks, **config)
    for event, step in log:
        if isinstance(event, GroupGranted):
            again.note(event)
            again.note(event)
        else:
            again.settle(event, step, differs=0 < event.num_solved < 8)
    assert again.pick(again.num_noted) == live.pick(live.num_noted)
    assert len(again._attempted) <= num_tasks


def attempted(num_solved: dict[str, int], step: int = 1, **config) -> Curriculum:
    """Return a curriculum of tasks that one group each attempted."""
    curriculum = make([make_task(name) for name in num_solved], **config)
    for index in range(len(num_solved)):
        one = grant(curriculum, index)
        curriculum.settle(settled(index, one.task_id, num_solved[one.task_id]), step, differs=False)
    return curriculum


def revisited(curriculum: Curriculum, num: int = 200) -> Counter[str]:
    first = curriculum.num_noted
    return Counter(curriculum.pick(first + n).task_id for n in range(num))


def test_what_is_always_or_never_solved_is_skipped_and_comes_back() -> None:
    curriculum = attempted({"never": 0, "always": 8, "half": 4, "seldom": 1})
    seen = revisited(curriculum)
    assert set(seen) == {"half", "seldom"}
    assert seen["half"] > seen["seldom"]
    assert curriculum.pick(4).num_skipped == 2
    curriculum.settle(settled(99, "none of these", 0), 1 + 16, differs=False)
    assert set(revisited(curriculum)) == {"never", "always", "half", "seldom"}


def test_the_more_speaks_against_a_task_the_later_it_comes_back() -> None:
    curriculum = attempted({"once": 0, "thrice": 0, "half": 4})
    for _ in range(2):
        curriculum.settle(settled(98, "thrice", 0), 1, differs=False)
    curriculum.settle(settled(99, "none of these", 0), 1 + 20, differs=False)
    assert set(revisited(curriculum)) == {"once", "half"}


def test_scores_that_differ_make_a_task_uncertain_though_none_solved_it() -> None:
    curriculum = attempted({"never": 0, "partial": 0})
    curriculum.settle(settled(9, "partial", 0), 1, differs=True)
    assert set(revisited(curriculum)) == {"partial"}


def test_where_nothing_is_uncertain_the_least_certain_is_attempted() -> None:
    curriculum = attempted({"a": 0, "b": 8})
    curriculum.settle(settled(9, "a", 0), 2, differs=False)
    one = curriculum.pick(2)
    assert (one.task_id, one.num_skipped) == ("b", 2)


def test_a_task_whose_group_runs_is_left_alone() -> None:
    curriculum = attempted({"a": 4, "b": 4, "c": 4})
    running = grant(curriculum, 3).task_id
    assert running not in revisited(curriculum)


def test_quarantined_tasks_are_not_attempted() -> None:
    curriculum = make([make_task("a"), make_task("b")])
    assert {grant(curriculum, index, {"a"}).task_id for index in range(4)} == {"b"}
    with pytest.raises(TasksExhaustedError, match="2 of 2 tasks are quarantined"):
        curriculum.pick(4, {"a", "b"})


def test_sources_and_categories_have_their_shares() -> None:
    tasks = [
        make_task(f"{source}{category}{n}", category, source)
        for source, category, num in (("x", "a", 400), ("x", "b", 400), ("y", "a", 400))
        for n in range(num)
    ]
    weights = {"a": 3.0, "b": 1.0}
    curriculum = make(tasks, {"x": 1.0, "y": 3.0}, category_weights=weights, seed=2)
    granted = [grant(curriculum, index) for index in range(400)]
    of = Counter((one.source, curriculum.task(one.task_id).category) for one in granted)
    assert of["y", "a"] == pytest.approx(300, abs=40)
    assert of["x", "a"] == pytest.approx(75, abs=30)
    assert of["x", "b"] == pytest.approx(25, abs=15)
    alone = make(tasks, {"x": 0.0, "y": 1.0})
    assert {grant(alone, index).source for index in range(500)} == {"y"}


def test_a_revisit_share_mixes_uncertain_tasks_in() -> None:
    tasks = [make_task(f"t{n}") for n in range(400)]
    curriculum, draw = make(tasks, revisit_share=0.25), random.Random(0)
    for index in range(200):
        one = grant(curriculum, index)
        entry = settled(index, one.task_id, draw.choice([0, 4, 8]))
        curriculum.settle(entry, index // 8, differs=False)
    revisits = sum(one.num_groups - 1 for one in curriculum._attempted.values())
    assert revisits == pytest.approx(50, abs=20)


def test_unknown_names_list_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"\['expert'\], expected some of easy"):
        make([make_task("t")], category_weights={"expert": 1.0})
    with pytest.raises(ConfigError, match="a task and a weight above 0"):
        make([make_task("t")], category_weights={"easy": 0.0})
