"""What people say of episodes: which labels count, and where they are seen."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.unit.monitor.episode_story import HOSTILE, TASK, TOKENIZER, episode, with_objects
from tests.unit.monitor.test_monitor_episodes import folded, memory_bus, stored

from penstock.actors.judge.rubric.config import CriterionConfig
from penstock.actors.monitor.episodes.collecting import EpisodeCollector
from penstock.actors.monitor.episodes.index import EpisodeIndex
from penstock.actors.monitor.episodes.reading import EpisodeReader
from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.envs.tasks.storage import tasks_key
from penstock.infra.commands.label import add_label, read_value
from penstock.infra.commands.show import read_filter, render_episode
from penstock.infra.judge.calibrate import episode_labels
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.errors import ConfigError, NotFoundError
from penstock.messages.reading.trajectories import last_of
from penstock.messages.rollout import RolloutFinished
from penstock.messages.signals.episode_labels import LABELERS_MAX, EpisodeLabeled, EpisodeLabels
from penstock.messages.task import Split, TaskStep


def label(labeler, value, number=0, rollout_id="g0-m0", comment=""):
    return EpisodeLabeled(
        rollout_id=rollout_id,
        group_id="g0",
        label_id=f"l{number}",
        labeler=labeler,
        value=value,
        comment=comment,
    )


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([None, 0.0, 0.5, 1.0]))))
def test_the_latest_of_each_labeler_counts(said):
    labels = EpisodeLabels()
    for labeler, value in said:
        labels.add(label(labeler, value))
    expected = {who: value for who, value in dict(said).items() if value is not None}
    assert {one.labeler: one.value for one in labels.of("g0-m0")} == expected
    assert labels.rollout_ids == (["g0-m0"] if expected else [])


def test_labelers_of_an_episode_are_bounded():
    labels = EpisodeLabels()
    for number in range(LABELERS_MAX + 5):
        labels.add(label(f"l{number}", 1.0))
    found = [one.labeler for one in labels.of("g0-m0")]
    assert (len(found), found[0]) == (LABELERS_MAX, "l5")


async def test_labels_are_in_rows_views_reports_and_the_terminal(capsys):
    store, bus = await stored(), memory_bus()
    events = [
        *episode("g0-m0"),
        *episode("g0-m1", index=1),
        label("ann", 0.0, 1),
        label("ann", 1.0, 2, comment=HOSTILE),
        label("bob", 0.5, 3),
    ]
    await bus.publish(events)
    index = folded(*events)
    row = index.find("g0-m0")
    assert (row.label, row.num_labels) == (0.75, 2)
    assert all(not one.comment for one in index.labels.of("g0-m0"))
    assert [one.rollout_id for one in index.select(read_filter(["is_labeled=true"], 9))] == [
        "g0-m0"
    ]
    view = await EpisodeReader(store, last_of(bus)).read("g0-m0", index)
    said = [(one.labeler, one.value, one.comment) for one in view.labels]
    assert said == [("ann", 1.0, HOSTILE), ("bob", 0.5, "")]
    Console(markup=False, width=120).print(render_episode(view))
    shown = capsys.readouterr().out
    assert "ann: 1.00" in shown and "\u202e" not in shown
    collector = EpisodeCollector()
    for event in events:
        collector.apply(event, 0.0)
    views = msgspec.json.decode((await collector.packed(store, last_of(bus)))[1])
    assert views["g0-m0"]["labels"][0]["comment"] == HOSTILE


def test_an_episode_that_goes_takes_its_labels_along():
    index = EpisodeIndex(num_episodes_max=1)
    for event in (*episode("g0-m0"), label("ann", 1.0), *episode("g0-m1")):
        if handler := index.handlers.get(type(event)):
            handler(event, 0.0)
    assert index.labels.rollout_ids == []


async def test_a_label_is_of_a_finished_episode_and_within_its_bounds():
    bus = memory_bus()
    await bus.publish(list(episode("g0-m0")))
    stored_label = await add_label(bus, "g0-m0", "ann", 0.5, "half")
    assert await last_of(bus)(EpisodeLabeled, stored_label.key()) == stored_label
    with pytest.raises(NotFoundError, match="episode nobody"):
        await add_label(bus, "nobody", "ann", 1.0, "")
    for fields in [
        ("ann", 2.0, ""),
        ("ann", float("nan"), ""),
        ("", 1.0, ""),
        ("a\x1b[2J", 1.0, ""),
        ("a", 1.0, "x" * 2001),
    ]:
        with pytest.raises(ConfigError, match="label: "):
            await add_label(bus, "g0-m0", *fields)


@pytest.mark.parametrize(
    ("text", "value"), [("good", 1), ("bad", 0), ("none", None), ("0.25", 0.25)]
)
def test_labels_are_words_or_numbers(text, value):
    assert read_value(text) == value


def test_another_word_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match="good, bad, none or a score"):
        read_value("fine")


async def test_judges_are_compared_with_labels_of_episodes():
    store, bus = await stored(), memory_bus()
    await store.put(tasks_key(Split.HELDOUT), msgspec.msgpack.encode([]))
    await bus.publish(
        [*episode("g0-m0"), *episode("g0-m1"), label("ann", 0.9), label("bob", 0.1, 1)]
    )
    criterion = CriterionConfig(name="good", text="Is it?")
    found = await episode_labels(bus, store, PenstockChat(TOKENIZER), criterion)
    best = max(criterion.choices, key=lambda one: criterion.choices[one])
    worst = min(criterion.choices, key=lambda one: criterion.choices[one])
    assert [one.choice for one in found] == [best, worst]
    assert found[0].task == HOSTILE and "+b" in found[0].diff


async def test_judges_are_compared_with_labels_of_tasks_of_several_steps():
    store, bus = MemoryStore(), memory_bus()
    step = TaskStep(instruction="Then this", files={"a.py": "next\n"})
    await with_objects(store, task=msgspec.structs.replace(TASK, steps=[step]))
    await store.put(tasks_key(Split.HELDOUT), msgspec.msgpack.encode([]))
    *turns, finished, verdict = episode("g0-m0")
    assert isinstance(finished, RolloutFinished)
    finished = msgspec.structs.replace(finished, step_ends=[0])
    await bus.publish([*turns, finished, verdict, label("ann", 0.9)])
    criterion = CriterionConfig(name="good", text="Is it?")
    [found] = await episode_labels(bus, store, PenstockChat(TOKENIZER), criterion)
    assert "Then this" in found.task and "-next" in found.diff
