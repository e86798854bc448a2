"""The examples' parts, without a run; `tests/e2e/examples` runs them whole."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

from penstock.actors.judge.judges import make_judge
from penstock.envs.harness.tools import tools_of
from penstock.infra.config.file import load_config
from penstock.messages.codec import encode
from penstock.messages.reading.asyncapi import document
from penstock.messages.reading.references import load_reference
from penstock.messages.reward import Outcome
from penstock.messages.rollout import EpisodeEnd
from penstock.messages.streams import event_subject
from penstock.messages.training import StepCompleted

EXAMPLES = Path(__file__).parents[3] / "examples"
STEP = StepCompleted(
    step=3, policy_version=3, weights_digest="a", optimizer_digest="b",
    metrics={"pass_rate": 0.25, "loss": 1.0}, staleness_tokens={0: 9},
)  # fmt: skip


@pytest.fixture
def config(monkeypatch):
    """The configuration of the own parts, in their folder."""
    monkeypatch.chdir(EXAMPLES / "own_parts")
    monkeypatch.setattr(sys, "path", list(sys.path))
    load_reference.cache_clear()
    yield load_config(Path("config.toml"))
    load_reference.cache_clear()
    sys.modules.pop("own", None)


@pytest.fixture
def monitor():
    spec = importlib.util.spec_from_file_location("monitor", EXAMPLES / "monitor.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Box:
    """A machine with one file, and a rollout in it."""

    sandbox = finished = property(lambda self: self)
    pages = ()

    def __init__(self, tools=(), end=EpisodeEnd.FINISHED):
        self.tool_names, self.end = [list(tools)], end

    async def read_file(self, path, bytes_max):
        return b"one\ntwo\n"


async def test_the_own_tool_numbers_lines(config):
    tool = tools_of(config.pacer.harness)["read_file"]
    assert await tool.run(Box(), {"path": "a.py"}) == "  1 one\n  2 two\n"


@pytest.mark.parametrize(
    ("tools", "end", "outcome"),
    [
        (["read_file", "finish"], EpisodeEnd.FINISHED, Outcome.SOLVED),
        (["finish"], EpisodeEnd.FINISHED, Outcome.FAILED),
        (["read_file"], EpisodeEnd.TURN_LIMIT, Outcome.FAILED),
    ],
)
async def test_the_own_judge_pays_for_the_tool(config, tools, end, outcome):
    found = await make_judge(config.judge).judge(Box(tools, end), None, None)
    assert found.outcome == outcome


def test_own_parts_are_fully_typed():
    tree = ast.parse((EXAMPLES / "own_parts" / "own.py").read_text())
    assert "Any" not in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    arguments = [one for each in functions for one in each.args.args if one.arg != "self"]
    assert all(one.annotation for one in arguments) and all(one.returns for one in functions)


def test_own_parts_are_of_at_most_120_lines():
    assert len((EXAMPLES / "own_parts" / "own.py").read_text().splitlines()) <= 120


def test_the_monitor_finds_and_reads_what_a_run_publishes(monitor):
    subject = monitor.subjects(document(), "r1")["StepCompleted"]
    assert event_subject("r1", STEP) == subject.replace(">", "3")
    assert set(monitor.WANTED) <= set(monitor.subjects(document(), "r1"))
    said = monitor.line(document(), monitor.read(encode(STEP)))
    assert said.startswith("[monitor] StepCompleted: step=3 policy_version=3")
    assert "pass_rate=0.25 loss=1" in said


def test_the_monitor_imports_nothing_of_ours(monitor):
    tree = ast.parse((EXAMPLES / "monitor.py").read_text())
    named = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    named |= {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    outside = {name.partition(".")[0] for name in named} - sys.stdlib_module_names
    assert outside == {"nats", "msgpack"}
