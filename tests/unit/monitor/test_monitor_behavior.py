"""How episodes go over training, and what the gain is made of."""

import io
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from penstock.actors.monitor.actor import exposition
from penstock.actors.monitor.behavior_views import (
    NUM_RECENT,
    NUM_WAITING_MAX,
    BehaviorRow,
    BehaviorView,
    BehaviorViews,
    gain_between,
    reads_before_writing,
)
from penstock.actors.monitor.curves import NUM_POINTS_MAX
from penstock.actors.monitor.fold import RunFold
from penstock.actors.monitor.state import decode_state, encode_state
from penstock.gateway.page.live_page import render_page
from penstock.infra.commands.status import render
from penstock.infra.config.file import load_config
from penstock.infra.run.summary import run_summary
from penstock.messages.reward import EvalAnnounced, Outcome
from penstock.messages.rollout import VersionSpan
from penstock.messages.task import Purpose

from .story import rollout

READ, EDIT = "read_file", "edit_file"


def played(name, version, outcome, *names, purpose=Purpose.TRAIN, group="g0", older=None):
    """End and verdict of a rollout that called these tools, a tuple each turn."""
    *_, end, verdict = rollout(name, version, outcome)
    turns = [end.turns[0]] * max(1, len(names))
    if older is not None:
        spans = [VersionSpan(policy_version=older, num_tokens=1), *turns[0].version_spans]
        turns[0] = msgspec.structs.replace(turns[0], version_spans=spans)
    end = msgspec.structs.replace(
        end, turns=turns, tool_names=[list(one) for one in names], purpose=purpose, group_id=group,
        num_calls=sum(map(len, names)),
    )  # fmt: skip
    return end, msgspec.structs.replace(verdict, purpose=purpose, group_id=group)


def viewed(events) -> BehaviorView:
    view = BehaviorView()
    views = BehaviorViews(view)
    for event in events:
        kind = type(event).__name__
        see = {"RolloutFinished": views.finished, "Verdict": views.judged}.get(kind)
        (see or views.announced)(event)
    views.measure()
    return view


def announced(version):
    return EvalAnnounced(eval_id=f"v{version}", policy_version=version, num_tasks=4)


def evaluated(version, *outcomes):
    """An evaluation: of each rollout whether it looked, and whether it solved its task."""
    events = [announced(version)]
    for index, (looks, solves) in enumerate(outcomes):
        outcome = Outcome.SOLVED if solves else Outcome.FAILED
        calls = [(READ,), (EDIT,)] if looks else [(EDIT,)]
        events += played(
            f"e{version}-{index}", version, outcome, *calls, purpose=Purpose.EVAL,
            group=f"v{version}",
        )  # fmt: skip
    return events


@pytest.mark.parametrize(
    ("names", "looked"),
    [
        ([[READ], [EDIT]], True),
        ([["grep"], [READ, READ], [EDIT, EDIT]], True),
        ([[READ]], True),
        ([[READ, EDIT]], False),
        ([[EDIT], [READ], [EDIT]], False),
        ([["write_file"], [READ]], False),
        ([[], ["grep"], ["no tool"]], False),
        ([], False),
    ],
)
def test_looking_is_reading_in_a_turn_before_the_first_change(names, looked):
    assert reads_before_writing(names) is looked


def test_figures_are_of_each_version_and_of_what_solved_its_task():
    view = viewed([
        *played("a", 3, Outcome.SOLVED, (READ, READ), (EDIT, EDIT), ("finish",)),
        *played("b", 3, Outcome.FAILED, (READ,), (EDIT,)),
        *played("c", 3, Outcome.FILTERED, (EDIT,)),
        *played("d", 3, Outcome.INFRASTRUCTURE_ERROR, (READ, READ)),
        *played("e", 5, Outcome.SOLVED, (READ,), (EDIT,)),
    ])  # fmt: skip
    first, second = view.training
    assert (first.policy_version, first.num_rollouts, second.policy_version) == (3, 3, 5)
    assert first.parallel_share == 2 / 6
    assert first.looked_share == 2 / 3
    assert (first.pass_rate, first.pass_rate_looked) == (1 / 3, 1 / 2)
    assert (first.calls_per_solved, first.turns_per_solved) == (5.0, 3.0)
    assert (second.calls_per_solved, second.parallel_share) == (2.0, 0.0)
    assert view.recent is not None and view.recent.num_rollouts == 4
    assert BehaviorRow(policy_version=0).calls_per_solved is None


def test_an_evaluation_counts_its_own_version_alone_and_training_is_apart():
    other = played("x", 2, Outcome.SOLVED, (READ,), purpose=Purpose.EVAL, group="v1")
    mixed = played("y", 1, Outcome.SOLVED, (READ,), purpose=Purpose.EVAL, group="v1", older=0)
    trained = played("z", 1, Outcome.SOLVED, (READ,))
    view = viewed([*evaluated(1, (True, True)), *other, *mixed, *trained])
    assert [(row.policy_version, row.num_rollouts) for row in view.evals] == [(1, 1)]
    assert [row.num_rollouts for row in view.training] == [1]
    assert view.gains == []


def test_the_gain_is_divided_into_looking_more_often_and_better_work():
    before = [(True, True)] * 2 + [(True, False)] * 2 + [(False, False)] * 6
    after = [(True, True)] * 8 + [(False, False)] * 2
    [gain] = viewed([*evaluated(0, *before), *evaluated(9, *after)]).gains
    assert (gain.version_before, gain.version_after) == (0, 9)
    assert (gain.share_looks_before, gain.share_looks_after) == (0.4, 0.8)
    assert (gain.pass_given_look_before, gain.pass_given_look_after) == (0.5, 1.0)
    assert gain.gain_by_better_work == pytest.approx(0.8 * 0.5 / 0.6)


def test_where_nothing_is_gained_or_nobody_looks_nothing_is_divided():
    some = BehaviorRow(
        policy_version=0, num_rollouts=4, num_looked=2, num_looked_solved=1, num_solved=1
    )
    blind = BehaviorRow(policy_version=1, num_rollouts=4, num_solved=3)
    assert gain_between(some, some, announced(0)).gain_by_better_work is None
    found = gain_between(some, blind, announced(1))
    assert (found.pass_after, found.pass_given_look_after) == (0.75, None)
    assert found.gain_by_better_work is None


def of_set(events, name, **about):
    """Return an evaluation's events as those of another set."""
    for event in events:
        renamed = {"group_id": f"{name}-{event.group_id}"} if hasattr(event, "group_id") else {}
        if isinstance(event, EvalAnnounced):
            renamed = {"eval_id": f"{name}-{event.eval_id}", "eval_set": name} | about
        else:
            renamed["rollout_id"] = f"{name}-{event.rollout_id}"
        yield msgspec.structs.replace(event, **renamed)


def test_each_evaluation_set_has_its_own_gain_and_the_main_one_comes_first():
    first, last = evaluated(0, (True, False), (False, False)), evaluated(4, (True, True))
    view = viewed([
        *of_set(first, "greedy", is_main=False, temperature=0.0),
        *of_set(last, "greedy", is_main=False, temperature=0.0),
        *of_set(first, "sampled", temperature=1.0),
        *of_set(last, "sampled", temperature=1.0),
        *of_set(last, "alone", is_main=False),
    ])  # fmt: skip
    assert [(one.eval_set, one.temperature) for one in view.gains] == [
        ("sampled", 1.0), ("greedy", 0.0),
    ]  # fmt: skip
    assert [row.policy_version for row in view.evals] == [0, 4]
    assert view.gains[1].pass_after == 1.0


@given(st.data())
def test_ends_verdicts_and_evaluations_may_come_in_any_order(data):
    events = [
        *evaluated(0, (True, False), (False, False)),
        *played("a", 0, Outcome.SOLVED, (READ, READ), (EDIT,)),
        *played("b", 1, Outcome.TIMEOUT, (EDIT,)),
        *evaluated(1, (True, True), (True, False)),
    ]
    assert viewed(data.draw(st.permutations(events))) == viewed(events)


def test_a_long_run_has_rows_of_several_versions_that_lose_nothing():
    num = 3 * NUM_POINTS_MAX
    view = viewed([
        event
        for version in range(num)
        for event in played(f"r{version}", version, Outcome.SOLVED, (READ,))
    ])  # fmt: skip
    assert len(view.training) <= NUM_POINTS_MAX
    assert sum(row.num_rollouts for row in view.training) == num
    versions = [row.policy_version for row in view.training]
    assert versions[0] == 0 and versions == sorted(set(versions))
    assert view.recent is not None and NUM_RECENT <= view.recent.num_rollouts < NUM_RECENT + 4


def test_what_waits_is_bounded():
    view = BehaviorView()
    views = BehaviorViews(view)
    end, verdict = played("first", 0, Outcome.SOLVED, (READ,))
    views.finished(end)
    for index in range(NUM_WAITING_MAX):
        views.finished(msgspec.structs.replace(end, rollout_id=f"r{index}"))
    views.judged(verdict)
    views.measure()
    assert view.training == []


def test_many_evaluations_keep_the_first_and_the_newest():
    view = viewed([
        event for version in range(NUM_POINTS_MAX + 2) for event in evaluated(version, (True, True))
    ])  # fmt: skip
    assert len(view.evals) <= NUM_POINTS_MAX
    assert (view.evals[0].policy_version, view.evals[-1].policy_version) == (0, NUM_POINTS_MAX + 1)


def test_page_metrics_status_and_summary_have_the_same_figures():
    fold = RunFold()
    for event in [
        *evaluated(0, (True, False), (False, False)),
        *played("a", 0, Outcome.SOLVED, (READ, READ), (EDIT, EDIT), ("finish",)),
        *played("b", 1, Outcome.FAILED, (READ,), (EDIT,)),
        *evaluated(2, (True, True), (True, True)),
        *of_set(evaluated(0, (True, True)), "greedy", is_main=False, temperature=0.0),
        *of_set(evaluated(2, (True, True)), "greedy", is_main=False, temperature=0.0),
    ]:
        fold.apply(event, 1.0)
    state = fold.state(1.0)
    assert decode_state(encode_state(state)).behavior == state.behavior
    lines = exposition(state).decode().splitlines()
    assert 'penstock_behavior{name="parallel_share"} 0.4' in lines
    assert 'penstock_behavior{name="turns_per_solved"} 3.0' in lines
    console = Console(width=160, file=io.StringIO())
    console.print(render(state))
    assert "40%, 100%" in console.file.getvalue() and "5.00, 3.00" in console.file.getvalue()
    config = load_config(Path("infra/configs/parallel-calls.toml"))
    found = run_summary(state, config, {}, started_at=0.0, ended_at=1.0)["behavior"]
    assert (found["before"]["pass_rate"], found["after"]["pass_rate"]) == (0.0, 1.0)
    assert found["after"]["calls_per_solved"] == 2.0
    gain = found["gain"]
    assert (gain["share_looks_before"], gain["share_looks_after"]) == (0.5, 1.0)
    assert (gain["pass_given_look_before"], gain["pass_given_look_after"]) == (0.0, 1.0)
    assert gain["gain_by_better_work"] == 1.0
    assert found["gain_by_set"]["greedy"]["temperature"] == 0.0
    assert set(re.findall(r"behavior\.(\w+)", render_page())) <= set(BehaviorView.__struct_fields__)
