"""Trails: what a task holds, what is held out, and what demonstrations show."""

import random

import pytest

from penstock.envs.tasks.storage import task_objects
from penstock.examples.quickstart.trail.config import TrailConfig, TrailHabits
from penstock.examples.quickstart.trail.tasks import draw_trails, is_heldout, to_candidate
from penstock.examples.quickstart.trail.walker import Walker
from penstock.messages.errors import ConfigError
from penstock.messages.task import Limits, Split

NUMBERS = {"one", "two", "three", "four"}
CONFIG = TrailConfig(num_stops=5, num_files=2, num_names=4, file_bytes=12)


def draw(split=Split.TRAIN, num=20, config=CONFIG, seed=0):
    return list(draw_trails(split, num, config, Limits(), random.Random(seed), "t"))


def walk(trail, walker, summarize_after=()):
    """Go a trail to its end; return the answer and the summaries."""
    summaries = []
    for step in range(100):
        calls = walker.calls()
        if calls[0].name == "write_file":
            return calls[0].arguments["content"], summaries
        walker.see([trail.task.pages[call.arguments["path"]] for call in calls])
        if step in summarize_after:
            summaries.append(walker.summary())
    raise AssertionError("no end")


def test_a_trail_has_what_its_settings_say():
    for trail in draw():
        texts = trail.task.pages.values()
        assert len(texts) == 10
        assert sum(not NUMBERS.isdisjoint(text.split()) for text in texts) == len(trail.names) == 4
        assert sum("next" in text for text in texts) == 4
        assert not trail.task.files
        assert to_candidate(trail).hidden.expected == [trail.answer]
        assert trail.answer.split()[2::2] == list(trail.names)


def test_a_walker_that_drops_nothing_brings_every_number_in_order():
    for trail in draw():
        walker = Walker(trail, TrailHabits(drops=0.0), random.Random(1))
        answer, summaries = walk(trail, walker, summarize_after=(0, 2, 3))
        assert answer == trail.answer
        assert all(stop in one for stop, one in zip(trail.stops[1:2], summaries, strict=False))


def test_what_a_summary_leaves_out_is_lost():
    trail = draw()[0]
    walker = Walker(trail, TrailHabits(drops=1.0), random.Random(1))
    answer, summaries = walk(trail, walker, summarize_after=(4,))
    assert len(answer.split()) == 1 + 2 * 3
    assert summaries == [f"{answer} end"]


def test_no_training_trail_begins_as_a_heldout_one():
    train, heldout = draw(num=200), draw(Split.HELDOUT, num=200)
    assert not any(is_heldout(list(trail.stops)) for trail in train)
    assert all(is_heldout(list(trail.stops)) for trail in heldout)
    assert {one.stops[:2] for one in train}.isdisjoint(one.stops[:2] for one in heldout)


def test_equal_seeds_give_equal_bytes():
    one, two = ([to_candidate(trail) for trail in draw()] for _ in range(2))
    assert task_objects(one, Split.TRAIN) == task_objects(two, Split.TRAIN)
    assert draw(seed=1)[0].stops != draw()[0].stops


def test_more_numbers_than_files_are_refused():
    with pytest.raises(ConfigError, match=r"^num_names: .* 4 files, got 5"):
        TrailConfig(num_stops=4, num_names=5)
