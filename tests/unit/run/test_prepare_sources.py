"""Tasks from several sources: names, weights, limits, and what contradicts."""

import asyncio
import json
import threading

import msgspec
import pytest
from tests.ladder import prepared, source
from tests.unit.run.test_prepare_objects import MemoryStore, run_config

from penstock.actors.evaluator.schedule import EvalSetConfig, EvaluatorConfig
from penstock.envs.tasks.harbor.write import write_harbor
from penstock.envs.tasks.storage import load_tasks
from penstock.examples.quickstart.ladder.generate import LadderSource, Selection, ladder_tasks
from penstock.infra.config.prepare import EpisodeLimits, PrepareConfig, SourceConfig, SourceKind
from penstock.infra.run import prepare as preparing
from penstock.infra.run.task_sources import drawn_tasks
from penstock.messages.errors import ConfigError
from penstock.messages.reading.references import load_reference
from penstock.messages.task import Split

SMALL = {"num_train_tasks": 6, "num_heldout_tasks": 3}
EASY = source("easy", settings={"categories": ["operator"]}, weight=3.0)
LIMITS = EpisodeLimits(num_turns_max=3, num_tokens_max=400, turn_tokens_max=64)


@pytest.fixture
def folder(tmp_path):
    """Return a folder of four tasks, as the factory writes them."""
    for split, candidates in drawn_tasks(prepared(**SMALL), 5).items():
        for number, one in zip(range(2), candidates, strict=False):
            origin = msgspec.structs.replace(one.origin, source=["library", "commits"][number])
            task = msgspec.structs.replace(one.task, task_id=f"mined-{split}-{number}")
            named = msgspec.structs.replace(one, task=task, origin=origin)
            write_harbor(named, split, tmp_path / "mined")
    return tmp_path / "mined"


def mix(folder, **changes):
    mined = {"name": "mined", "kind": SourceKind.FOLDER, "path": str(folder)} | changes
    trails = source("long", "trail_tasks", {}, weight=0.0, num_heldout_tasks=2)
    return prepared(sources=(EASY, SourceConfig(**mined), trails), **SMALL)


def drawn(config, seed=3):
    return {split: [one.task for one in of] for split, of in drawn_tasks(config, seed).items()}


def test_each_task_has_its_source_and_its_limits(folder):
    tasks = drawn(mix(folder, limits=LIMITS))
    names = {split: [task.source for task in of] for split, of in tasks.items()}
    assert names[Split.TRAIN] == ["easy"] * 6 + ["mined"] * 2, "a weight of 0 trains nothing"
    assert names[Split.HELDOUT] == ["easy"] * 3 + ["mined"] * 2 + ["long"] * 2
    for task in tasks[Split.TRAIN]:
        expected = LIMITS if task.source == "mined" else PrepareConfig().limits
        assert msgspec.structs.asdict(task.limits) == msgspec.structs.asdict(expected)
    assert {task.category for task in tasks[Split.TRAIN][:6]} == {"operator"}
    every = [task.task_id for of in tasks.values() for task in of]
    assert len(set(every)) == len(every)
    assert drawn(mix(folder, limits=LIMITS)) == tasks, "the same seed gives the same tasks"


def test_a_folder_named_alone_stands_for_all_sources(folder):
    tasks = drawn(prepared(tasks=str(folder), evaluates_unseparated=True))
    assert [task.source for task in tasks[Split.TRAIN]] == ["folder"] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"categories": ["lader"]},
            r"^prepare\.sources\.x\.settings\.categories: expected some",
        ),
        ({"families": 3}, r"^prepare\.sources\.x\.settings\.families: Expected `array`"),
        ({"rungs": []}, r"^prepare\.sources\.x\.settings: .* unknown field `rungs`"),
    ],
)
def test_own_settings_are_checked_by_their_own_code_and_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        drawn(prepared(sources=(source("x", settings=settings),)))


def test_own_code_is_asked_for_the_tasks_of_each_split(monkeypatch):
    asked = []

    def make(seed, request):
        asked.append((seed, request.split, request.num_tasks, request.source))
        for one in ladder_tasks(seed, request):
            yield one
        yield one  # One too many, which nobody takes.

    monkeypatch.setattr("penstock.examples.quickstart.ladder_tasks", make)
    load_reference.cache_clear()
    tasks = drawn(prepared(sources=(source(num_heldout_tasks=2),), num_train_tasks=5))
    load_reference.cache_clear()
    assert asked == [(3, Split.TRAIN, 5, "ladder"), (3, Split.HELDOUT, 2, "ladder")]
    assert [len(of) for of in tasks.values()] == [5, 2]


def test_a_folder_gives_some_of_its_tasks(folder):
    [task] = drawn(mix(folder, origins=("commits",)))[Split.TRAIN][6:]
    assert task.task_id == "mined-train-1"
    assert len(drawn(mix(folder, num_train_tasks=1))[Split.TRAIN]) == 7
    with pytest.raises(ConfigError, match=r"mined\.origins: expected some of commits, library"):
        drawn(mix(folder, origins=("package",)))


def test_a_run_s_only_source_is_as_it_always_was():
    own = drawn(prepared(**SMALL))
    for split, num in ((Split.TRAIN, 6), (Split.HELDOUT, 3)):
        rng = preparing.random.Random(f"{split}/3")
        ladder = LadderSource(split, num, Selection(), rng, split.value)
        limits = PrepareConfig().limits
        expected = [
            msgspec.structs.replace(one.task, limits=limits, source="ladder")
            for one in ladder.candidates()
        ]
        assert own[split] == expected


def test_a_task_of_two_sources_is_refused(folder):
    sources = tuple(
        SourceConfig(name=name, kind=SourceKind.FOLDER, path=str(folder)) for name in ("a", "b")
    )
    with pytest.raises(ConfigError, match=r"sources\.b: .* got 'mined-train-0' of 'a', too"):
        drawn(PrepareConfig(sources=sources))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sources": (EASY, EASY)}, "expected each name once, got 'easy' twice"),
        (
            {"sources": (msgspec.structs.replace(EASY, weight=0.0),)},
            "prepare.sources: expected a weight above 0",
        ),
    ],
)
def test_settings_that_contradict_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        PrepareConfig(**settings)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"kind": "folder"}, r"sources\.x\.path: expected the folder, got ''"),
        ({"kind": "own", "path": "d"}, r"sources\.x\.path: expected none with kind own"),
        (
            {"kind": "own", "make": "a:b", "origins": ["commits"]},
            r"sources\.x\.origins: expected none",
        ),
        ({"kind": "own"}, r"sources\.x\.make: expected module:name with kind own"),
        (
            {"kind": "folder", "path": "d", "settings": {"a": 1}},
            r"sources\.x\.settings: expected none with kind folder",
        ),
        ({"kind": "lader"}, "Invalid enum value"),
    ],
)
def test_a_source_s_settings_are_of_its_kind(source, message):
    with pytest.raises((ConfigError, msgspec.ValidationError), match=message):
        msgspec.convert({"name": "x"} | source, SourceConfig)


def test_evaluation_sets_choose_among_sources(folder):
    config = run_config(mix(folder))
    sets = (EvalSetConfig(name="mined", sources=["mined"], categories=["operator"]),)
    fitting = msgspec.structs.replace(config, evaluator=EvaluatorConfig(sets=sets))
    store = MemoryStore()
    store.objects = preparing._task_sets(fitting, threading.Event())
    tasks = asyncio.run(load_tasks(store, Split.HELDOUT))
    assert {task.source for task in tasks} == {"easy", "mined", "long"}
    sets = (EvalSetConfig(name="mined", categories=["expert"]),)
    wrong = msgspec.structs.replace(config, evaluator=EvaluatorConfig(sets=sets))
    with pytest.raises(ConfigError, match=r"sets\.mined: expected some of .*\['expert'\]"):
        preparing._task_sets(wrong, threading.Event())
    with pytest.raises(ConfigError, match=r"sets\.m\.sources: expected some of ladder, got other"):
        EvaluatorConfig(sets=(EvalSetConfig(name="m", sources=["other"]),)).check_sets(
            ["ladder"], 1.0
        )
    several = EvaluatorConfig(sets=(EvalSetConfig(name="m", num_samples=4),))
    several.check_sets([], 1.0)
    with pytest.raises(ConfigError, match=r"m\.num_samples: expected 1, as pacer\.eval_temp"):
        several.check_sets([], 0.0)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), 1e308, -1.0])
def test_weights_of_sources_are_numbers_that_can_be_added(weight):
    given = {"name": "a", "kind": "own", "make": "a:b", "weight": weight}
    with pytest.raises(msgspec.ValidationError, match=r"Expected `float` .* at `\$\.weight`"):
        msgspec.convert(given, SourceConfig)


def prompts(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prepared(sources=(SourceConfig(name="mine", kind=SourceKind.PROMPTS, path=str(path)),))


def test_a_file_of_prompts_makes_tasks_without_files_or_tests(tmp_path):
    rows = [{"id": "a", "prompt": "Add."}, {"id": "b", "prompt": "Sub.", "split": "heldout"}]
    tasks = drawn(prompts(tmp_path / "p.jsonl", *rows))
    assert [task.instruction for task in tasks[Split.TRAIN]] == ["Add."]
    assert [task.task_id for task in tasks[Split.HELDOUT]] == ["b"]
    assert tasks[Split.TRAIN][0].source == "mine"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "x"}, "missing required field `id`"),
        ({"id": "../x", "prompt": "x"}, "id"),
        ({"id": "a", "prompt": "x"}, "'a' twice"),
        ({"id": "b", "prompt": "x", "split": "test"}, "split"),
        ({"id": "b", "prompt": "x", "tests": 1}, "unknown field `tests`"),
    ],
)
def test_a_malformed_prompt_is_refused_with_file_and_line(tmp_path, row, expected):
    with pytest.raises(
        ConfigError, match=rf"prepare\.sources\.mine\.path: .*p\.jsonl:2.*{expected}"
    ):
        drawn(prompts(tmp_path / "p.jsonl", {"id": "a", "prompt": "Add."}, row))
