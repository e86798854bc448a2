"""Own code that settings name, and the project that `penstock init` writes."""

import argparse
import ast
import importlib.util
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import torch
from tests.e2e.launched import penstock

from penstock.actors.judge.config import JudgeConfig
from penstock.actors.judge.judges import make_judge
from penstock.actors.trainer.config import LossConfig
from penstock.actors.trainer.objective.losses import LossTokens, token_losses
from penstock.envs.harness.session import ToolSession
from penstock.envs.harness.tools import tools_of, tools_prompt
from penstock.examples.quickstart.ladder.dry_run import DryRunSandbox
from penstock.infra.commands.init import init_command
from penstock.infra.commands.log import imported_config
from penstock.infra.config.file import load_config
from penstock.infra.config.prepare import PrepareConfig
from penstock.infra.run.prepare import build
from penstock.infra.run.task_sources import drawn_tasks
from penstock.messages.errors import ConfigError
from penstock.messages.reading.references import load_reference
from penstock.messages.rollout import ToolCall
from penstock.messages.task import Limits, Split

QUICKSTART = Path("examples/quickstart/config.toml").resolve()
BAD = "def bad_loss(tokens, config):\n    return tokens.current\nbad_tools = {'finish': 1}\n"


SMALL = (
    "trainer.steps_max=4", "trainer.midtrain.num_tokens=20_000", "evaluator.num_eval_tasks=4",
    "prepare.num_heldout_tasks=4", "prepare.corpora.settings.num_demonstrations=24",
)  # fmt: skip


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The folder of a new project, in which we are; what is imported from it goes again."""
    folder = tmp_path / "project"
    init_command(argparse.Namespace(folder=folder, example="own_parts"))
    (folder / "bad_parts.py").write_text(BAD)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    load_reference.cache_clear()
    yield folder
    load_reference.cache_clear()
    for name in ("own", "bad_parts"):
        sys.modules.pop(name, None)


def tokens():
    zeros = torch.zeros(3)
    return LossTokens(
        current=torch.tensor([-1.0, -2.0, -3.0]), proximal=zeros, behavior=zeros,
        advantages=torch.tensor([1.0, -1.0, 0.5]), weights=torch.ones(3),
        sequence_ids=torch.zeros(3, dtype=torch.int64),
    )  # fmt: skip


def test_a_projects_own_tests_pass(project):
    sys.path.append(str(project))
    spec = importlib.util.spec_from_file_location("test_own", project / "tests" / "test_own.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert len(tests) == 4
    for test in tests:
        test()


def test_a_projects_parts_are_fully_typed(project):
    tree = ast.parse((project / "own.py").read_text())
    assert "Any" not in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert "__new__" not in (project / "tests" / "test_own.py").read_text()


def test_a_projects_configuration_names_what_is_there(project):
    config = load_config(project / "config.toml")
    assert config.pacer.harness == config.prepare.harness == "own:TOOLS"
    assert "count_lines" in tools_of(config.pacer.harness)
    assert "count_lines path" in tools_prompt(config.pacer.harness)
    assert make_judge(config.judge).version == "1"
    assert config.evaluator.judge == config.judge.judge == "own:Looks"  # Its verdicts' name.
    own = token_losses(tokens(), config.trainer.loss)
    assert torch.equal(own.values, token_losses(tokens(), LossConfig()).values)
    sources = [one for one in config.prepare.sources if one.name == "own"]
    drawn = drawn_tasks(msgspec.structs.replace(config.prepare, sources=sources), seed=7)
    assert {split: len(list(found)) for split, found in drawn.items()} == {
        Split.TRAIN: 6, Split.HELDOUT: 2
    }  # fmt: skip


async def test_an_episode_offers_own_tools_beside_the_others(project):
    session = ToolSession("own:TOOLS", DryRunSandbox({"a.py": "one\ntwo\n"}), Limits())
    calls = [
        ToolCall(name="count_lines", arguments={"path": "a.py"}),
        ToolCall(name="count_lines", arguments={}),
        ToolCall(name="count_lines", arguments={"path": "absent.py"}),
        ToolCall(name="read_file", arguments={"path": "a.py"}),
    ]
    counted, wrong, absent, read = await session.run(calls)
    assert (counted.text, read.text) == ("2", "  1 one\n  2 two\n")
    assert not wrong.is_valid and "path" in wrong.text
    assert (absent.is_valid, absent.text) == (False, "error: no file absent.py")
    assert len(session.elapsed_s) == 4 and min(session.elapsed_s) >= 0


def test_nothing_is_overwritten(project):
    with pytest.raises(FileExistsError, match="expected a new or empty folder"):
        init_command(argparse.Namespace(folder=project, example="own_parts"))


@pytest.mark.parametrize("name", ["absent:loss", "own:absent"])
def test_what_is_not_there_is_named(project, name):
    with pytest.raises(ConfigError, match=rf"trainer\.loss\.name: '{name}': expected a name"):
        token_losses(tokens(), LossConfig(name=name))
    with pytest.raises(ConfigError, match=rf"judge\.judge: '{name}'"):
        make_judge(JudgeConfig(judge=name))
    with pytest.raises(ConfigError, match=rf"pacer\.harness: '{name}'"):
        tools_of(name)


def test_what_is_no_such_part_is_refused(project):
    with pytest.raises(ConfigError, match=r"expected TokenLosses of \(3,\) values"):
        token_losses(tokens(), LossConfig(name="bad_parts:bad_loss", correction="none"))
    with pytest.raises(ConfigError, match="expected a dict of ToolSpec"):
        tools_of("bad_parts:bad_tools")
    source = {"name": "x", "kind": "own", "make": "builtins:range"}
    prepare = msgspec.convert({"sources": [source]}, PrepareConfig)
    with pytest.raises(ConfigError, match="expected TaskCandidate, got int"):
        list(drawn_tasks(prepare, seed=3)[Split.TRAIN])


@pytest.mark.parametrize("name", ["own:", ":loss", "a b:c", "own:loss:more", "../own:loss", "nope"])
def test_a_reference_is_a_module_and_a_name(project, name):
    wrong = project / "wrong.toml"
    wrong.write_text(f'base = "config.toml"\n[trainer.loss]\nname = "{name}"\n')
    with pytest.raises(ConfigError, match=r"trainer\.loss\.name"):
        load_config(wrong)


def test_a_strangers_log_chooses_no_code():
    with pytest.raises(ConfigError, match="expected no own code from a stranger's file"):
        imported_config('[trainer.loss]\nname = "os:system"\n', "x.penstock")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_project_runs_and_replays(project, tmp_path):
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests"], check=False)
    assert done.returncode == 0
    small = [word for setting in SMALL for word in ("--set", setting)]
    words = ["run", "--config", "config.toml", "--run-id", "own", *small]
    done = penstock(tmp_path, *words, wait_s=500.0)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = penstock(tmp_path, "log", "cat", "own", "--type", "Verdict").stdout.splitlines()
    assert verdicts and all('"judge":"own:Looks"' in line for line in verdicts)
    assert any('"source":"own"' in line for line in verdicts)


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """The folder of a copy of the quickstart, in which we are."""
    folder = tmp_path / "copy"
    init_command(argparse.Namespace(folder=folder, example="quickstart"))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    load_reference.cache_clear()
    yield folder
    load_reference.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "quickstart"]:
        del sys.modules[name]


def test_a_copy_of_the_quickstart_is_the_same_under_its_own_name(copied):
    few = [
        "prepare.num_train_tasks=3", "prepare.num_heldout_tasks=2",
        "prepare.corpora.settings.num_demonstrations=5",
        "prepare.corpora.settings.code_tokens=500", "trainer.midtrain.uses_cache=false",
    ]  # fmt: skip
    config, original = load_config(copied / "config.toml", few), load_config(QUICKSTART, few)
    assert "penstock.examples" not in (copied / "config.toml").read_text()
    assert config.users.run == "quickstart:users"
    assert build(config, threading.Event()) == build(original, threading.Event())
    assert sys.modules["quickstart"].__file__ == str(copied / "quickstart" / "__init__.py")
