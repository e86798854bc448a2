"""Rows and views of single episodes, from the log and the store alone."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.support.memory_bus.bus import MemoryBus
from tests.support.memory_bus.server import MemoryServer
from tests.unit.monitor.episode_story import (
    HOSTILE,
    TASK,
    TOKENIZER,
    episode,
    manifest,
    with_objects,
)

from penstock.actors.monitor.episodes.collecting import EpisodeCollector
from penstock.actors.monitor.episodes.index import EpisodeIndex
from penstock.actors.monitor.episodes.reading import (
    TEXT_CHARS_MAX,
    EpisodeReader,
    pieces,
    shortened,
    unified_diff,
)
from penstock.actors.runtime.clock import SystemClock
from penstock.infra.commands.show import read_filter, render_episode, whole_id
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.errors import ConfigError, NotFoundError
from penstock.messages.reading.trajectories import last_of
from penstock.messages.requests.episodes import EpisodeFilter
from penstock.messages.reward import Outcome
from penstock.messages.rollout import RolloutFinished
from penstock.messages.task import TaskStep


def memory_bus() -> MemoryBus:
    server = MemoryServer(seed=1, clock=SystemClock())
    return MemoryBus(server, run_id="r1", store=MemoryStore(), name="test")


async def stored() -> MemoryStore:
    store = MemoryStore()
    await with_objects(store)
    return store


def folded(*events) -> EpisodeIndex:
    index = EpisodeIndex()
    for at, event in enumerate(events):
        if handler := index.handlers.get(type(event)):
            handler(event, float(at))
    return index


async def test_an_episode_is_read_whole():
    store, bus = await stored(), memory_bus()
    events = [*episode("g0-m0"), *episode("g0-m1", outcome=Outcome.FAILED), manifest("g0-m0")]
    await bus.publish(events)
    another = [one for one in episode("g0-m2") if isinstance(one, RolloutFinished)]
    events += [msgspec.structs.replace(one, task_id="another") for one in another]
    view = await EpisodeReader(store, last_of(bus)).read("g0-m0", folded(*events))
    assert view.instruction == HOSTILE
    assert ["".join(one.pieces) for one in view.turns] == ["read é", "edit"]
    assert view.turns[0].context == HOSTILE
    assert view.turns[0].logprobs == [-0.5] * len(view.turns[0].pieces)
    assert "-a" in view.diff
    assert "+b" in view.diff
    assert "c.bin: binary file of 1 bytes" in view.diff
    assert view.verdict is not None
    assert (view.verdict.num_tests_passed, view.verdict.num_tests) == (1, 2)
    assert (view.row.step, view.row.fate, view.row.advantage) == (7, Outcome.SOLVED, 0.5)
    assert [row.rollout_id for row in view.group] == ["g0-m0", "g0-m1"]


async def test_a_diff_is_against_all_that_a_task_had_written():
    store, bus = MemoryStore(), memory_bus()
    step = TaskStep(instruction="Next", files={"c.bin": "c\n"})
    await with_objects(store, task=msgspec.structs.replace(TASK, steps=[step]))
    events = [
        msgspec.structs.replace(one, step_ends=[0]) if isinstance(one, RolloutFinished) else one
        for one in episode("g0-m0")
    ]
    await bus.publish(events)
    view = await EpisodeReader(store, last_of(bus)).read("g0-m0", folded(*events))
    assert "c.bin: binary file of 1 bytes (2 before)" in view.diff


async def test_a_turn_that_was_collected_is_shown_as_such():
    store, bus = await stored(), memory_bus()
    events = list(episode("g0-m0"))
    await bus.publish(events[1:])  # all but the first turn
    view = await EpisodeReader(store, last_of(bus)).read("g0-m0", folded(*events))
    assert "g0-m0.0" in view.turns[0].missing
    assert "".join(view.turns[1].pieces) == "edit"


async def test_an_unknown_episode_is_refused_by_name():
    reader = EpisodeReader(await stored(), last_of(memory_bus()))
    with pytest.raises(NotFoundError, match="episode nobody"):
        await reader.read("nobody", EpisodeIndex())


async def test_a_terminal_shows_a_hostile_episode_as_text(capsys):
    store, bus = await stored(), memory_bus()
    events = [*episode("g0-m0"), manifest("g0-m0")]
    await bus.publish(events)
    view = await EpisodeReader(store, last_of(bus)).read("g0-m0", folded(*events))
    Console(markup=False, width=120).print(render_episode(view))
    shown = capsys.readouterr().out
    assert "step 7: trained, advantage +0.500" in shown
    assert "\\u001b[2J\\u202e" in shown
    assert "\u202e" not in shown


async def test_a_report_holds_the_newest_episodes_within_its_bounds():
    store, last = await stored(), last_of(memory_bus())
    collector = EpisodeCollector(num_episodes_max=2)
    for at, name in enumerate(["a", "b", "c"]):
        for event in episode(name, group=name):
            collector.apply(event, float(at))
    rows, views = map(msgspec.json.decode, await collector.packed(store, last))
    assert [row["rollout_id"] for row in rows] == ["c", "b"]
    assert sorted(views) == ["b", "c"]
    assert views["c"]["turns"][1]["pieces"]
    few = EpisodeCollector(num_tokens_max=1)
    for name in ("a", "b"):
        for event in episode(name):
            few.apply(event, 0.0)
    assert list(msgspec.json.decode((await few.packed(store, last))[1])) == ["b"]


def test_filters_keep_what_they_say():
    index = folded(*episode("g0-m0"), *episode("g1-m0", "g1", Outcome.FAILED, 1), manifest("g0-m0"))
    assert [row.rollout_id for row in index.select(EpisodeFilter())] == ["g1-m0", "g0-m0"]
    for conditions, expected in [
        (["outcome=failed"], ["g1-m0"]),
        (["text=G0"], ["g0-m0"]),
        (["step=7"], ["g0-m0"]),
        (["turns_min=3"], []),
        (["reward_max=0.5"], []),
    ]:
        wanted = read_filter(conditions, 40)
        assert [row.rollout_id for row in index.select(wanted)] == expected, conditions
    assert whole_id("g1", index) == "g1-m0"
    assert whole_id("g1-…", index) == "g1-m0"
    with pytest.raises(NotFoundError, match="several ids begin with it: g1-m0, g0-m0"):
        whole_id("g", index)


@pytest.mark.parametrize("bad", ["outcome", "outcome=best", "nothing=1", "limit=3", "step=-1"])
def test_a_wrong_filter_is_refused_by_name(bad):
    with pytest.raises(ConfigError, match="--where"):
        read_filter([bad], 40)


def test_the_index_keeps_the_newest():
    index = EpisodeIndex(num_episodes_max=1)
    for name in ("a", "b"):
        for event in episode(name):
            if handler := index.handlers.get(type(event)):
                handler(event, 0.0)
    assert [row.rollout_id for row in index.select(EpisodeFilter())] == ["b"]


@given(st.binary(max_size=60))
def test_pieces_join_to_the_text(data: bytes):
    ids = TOKENIZER.encode(data)
    found = pieces(ids, TOKENIZER)
    assert len(found) == len(ids)
    assert "".join(found) == TOKENIZER.decode(ids)


def test_long_texts_are_cut_and_say_so():
    assert shortened("x" * (TEXT_CHARS_MAX + 5)).endswith("[5 more characters]")
    assert "--- /dev/null" in unified_diff({}, {"new.py": b"x"}, [])
    assert "+++ /dev/null" in unified_diff({"old.py": b"x"}, {}, ["old.py"])
