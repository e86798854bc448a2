"""`import penstock`: runs from a program."""

import ast
import os
from pathlib import Path

import msgspec
import pytest
from tests.e2e.launched import TINY
from tests.unit.monitor.story import finished, story

import penstock
from penstock.infra.api.names import NAMES
from penstock.infra.config.file import load_config
from penstock.infra.run.launcher import event_server
from penstock.infra.run.runs import RunDir, open_log
from penstock.messages.errors import ConfigError, NotFoundError


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """A run of the story, which is down."""
    run = RunDir(tmp_path / "r1")
    run.path.mkdir()
    run.config.write_text("")
    async with open_log(run, "test") as bus:
        await bus.publish([*story(), finished()])
    return tmp_path


def test_every_name_is_there() -> None:
    assert set(NAMES) <= set(dir(penstock)) and len(NAMES) <= 45
    for name in NAMES:
        assert getattr(penstock, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = penstock.nothing


def test_type_checkers_see_the_names_that_programs_get() -> None:
    tree = ast.parse(Path(penstock.__file__ or "").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    seen = {
        alias.asname: (node.module, alias.name)
        for node in imports
        if node.module != "importlib"
        for alias in node.names
        if alias.asname
    }
    assert seen == NAMES


def test_classes_bear_the_name_they_are_offered_by() -> None:
    found = {name: getattr(penstock, name) for name in NAMES}
    assert not {
        name for name, one in found.items() if isinstance(one, type) and one.__name__ != name
    }


def test_the_type_of_an_argument_is_a_word_or_a_member() -> None:
    schema = {"type": "integer", "description": "x", "minimum": 0, "maximum": 4096}
    assert penstock.Argument("x", "integer").schema() == schema
    assert penstock.Argument("x", penstock.ArgumentType.INTEGER).schema() == schema
    assert penstock.Argument("x", "boolean").parse("x", "true") is True
    with pytest.raises(ConfigError, match="expected one of string, integer, boolean, got 'int'"):
        penstock.Argument("x", "int")


async def test_a_run_is_followed_to_its_end(folder: Path) -> None:
    run = penstock.open_run("r1", folder)
    kinds = [
        type(one.event).__name__ async for one in run.subscribe("StepCompleted", "RunFinished")
    ]
    assert sorted(kinds) == ["RunFinished", "StepCompleted", "StepCompleted"]
    assert run.run_id == "r1" and run.path == folder / "r1"


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(penstock.__file__).read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == NAMES


def test_a_log_is_read_as_events_and_tables(folder: Path) -> None:
    run = penstock.open_run(str(folder / "r1"))
    assert [one.event.step for one in run.events("StepCompleted")] == [1, 2]
    with pytest.raises(NotFoundError, match="event Nothing: expected one of"):
        run.events("Nothing")
    pytest.importorskip("pandas", reason="pip install -e '.[frames]'")
    frame = run.frame("StepCompleted")
    assert list(frame["metrics.reward_mean"]) == [0.5, 0.5] and list(frame["step"]) == [1, 2]
    assert (frame["stored_at"] > 0).all()


def test_settings_of_a_run_are_checked(tmp_path: Path) -> None:
    config = Path(__file__).parents[3] / "examples" / "quickstart" / "config.toml"
    settings = {"trainer.steps_max": 2, "trainer.loss.name": "none"}
    with pytest.raises(ConfigError, match=r"trainer\.loss\.name"):
        penstock.run(config, settings=settings, runs_dir=tmp_path)
    with pytest.raises(NotFoundError, match="run 'latest': not found"):
        penstock.open_run(runs_dir=tmp_path)


async def test_a_run_that_this_process_ran_is_down_afterwards(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r1")
    run.path.mkdir()
    run.config.write_text("")
    async with event_server(run, load_config(TINY)) as bus:
        assert run.read_state() is not None
        await bus.publish([*story(), finished()])
    assert run.read_state() is None
    async for delivery in penstock.open_run("r1", tmp_path).subscribe("RunFinished"):
        assert delivery.event == finished()


@pytest.mark.parametrize("content", [b"{", None])
async def test_a_state_that_cannot_be_ended_hides_no_other_error(tmp_path: Path, content) -> None:
    run = RunDir(tmp_path / "r1")
    run.path.mkdir()
    run.config.write_text("")

    async def fail() -> None:
        async with event_server(run, load_config(TINY)):
            run.state.unlink()
            run.state.write_bytes(content) if content else run.state.mkdir()
            raise ConfigError("what the run ended with")

    with pytest.raises(ConfigError, match="what the run ended with"):
        await fail()


def test_only_the_process_that_runs_it_ends_a_state(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_state("nats://127.0.0.1:1")
    others = msgspec.json.decode(run.state.read_bytes()) | {"pid": os.getppid()}
    run.state.write_bytes(msgspec.json.encode(others))
    run.end_state()
    state = run.read_state()
    assert state is not None
    assert (state.pid, state.url) == (os.getppid(), "nats://127.0.0.1:1")
