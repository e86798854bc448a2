"""The recipes of CONTRIBUTING.md, taken literally: each fails where it says so, and ends green."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.tidy.repository import ROOT
from tests.tidy.scratch import copy, edit, write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
BIN = Path(sys.executable).parent


class Recipe:
    """One section's code, and a copy of the repository to try it in."""

    def __init__(self, root: Path, title: str) -> None:
        self.root = root
        text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
        section = re.split(r"\n##", text.split(f"### {title}\n")[1])[0]
        found = re.findall(r"   ```python\n(.*?)   ```", section, re.DOTALL)
        self.code = [textwrap.dedent(each) for each in found]

    def run(self, *words: str) -> int:
        """Run a tool of the environment in the copy; return its exit code."""
        path = {"PYTHONPATH": str(self.root / ".pyroot")}
        command = [str(BIN / words[0]), *words[1:]]
        return subprocess.run(command, cwd=self.root, env=os.environ | path, check=False).returncode

    def test(self, *words: str) -> bool:
        """Run tests in the copy; return whether they pass."""
        return self.run("python", "-m", "pytest", *words) == 0

    def is_reached(self) -> bool:
        """Return whether the product reaches all of its names."""
        return self.run("python", "-m", "tests.tidy.unreachable") == 0

    def ends_green(self, *tests: str) -> None:
        """Expect the quick gates, and some tests, to pass."""
        self.run("ruff", "check", "--fix", "--quiet", ".")
        self.run("ruff", "format", "--quiet", ".")
        assert self.run("ruff", "check", ".") == 0
        assert self.run("lint-imports", "--no-cache") == 0
        assert self.is_reached()
        assert self.test("tests/tidy/test_tidy.py", *tests)


@pytest.fixture
def recipe(tmp_path: Path, request: pytest.FixtureRequest) -> Recipe:
    return Recipe(copy(tmp_path), request.param)


@pytest.mark.parametrize("recipe", ["A message"], indirect=True)
def test_a_message(recipe: Recipe):
    topic, codec = "messages/feedback.py", "messages/codec.py"
    old = (recipe.root / topic).read_text(encoding="utf-8")
    write(recipe.root, {topic: f"{old}\n\n{recipe.code[0]}"})
    edit(recipe.root, codec, "feedback import (\n", "feedback import (\n    FeedbackExported,\n")
    edit(recipe.root, codec, "EVENTS = (\n", "EVENTS = (\n    FeedbackExported,\n")
    assert not recipe.test("tests/golden/test_golden_messages.py")
    assert recipe.run("python", "-m", "tests.golden.write") == 0
    recipe.ends_green("tests/golden/test_golden_messages.py", "tests/unit/messages")


@pytest.mark.parametrize("recipe", ["An actor"], indirect=True)
def test_an_actor(recipe: Recipe):
    folder = "actors/step_counter"
    config, actor, role = recipe.code
    files = {"__init__.py": '"""Counts steps."""\n', "config.py": config, "actor.py": actor}
    write(recipe.root, {f"{folder}/{name}": text for name, text in files.items()})
    assert not recipe.is_reached()
    assert not recipe.test("tests/tidy/test_tidy.py")
    contract = '"penstock.actors.pacer"'
    edit(recipe.root, "pyproject.toml", contract, f'"penstock.actors.step_counter", {contract}')
    name, settings = "infra/config/settings.py", "StepCounterConfig"
    line = f"from penstock.{folder.replace('/', '.')}.config import {settings}\n"
    edit(recipe.root, name, "from penstock.", f"{line}from penstock.")
    field = f"    step_counter: {settings} = {settings}()\n"
    edit(recipe.root, name, "    gateway: Gateway", f"{field}    gateway: Gateway")
    edit(recipe.root, "infra/run/roles.py", "Build] = {\n", f"Build] = {{\n    {role}")
    recipe.ends_green("tests/unit/infra/test_infra_config.py")


@pytest.mark.parametrize("recipe", ["A judge"], indirect=True)
def test_a_judge(recipe: Recipe):
    judge, line = recipe.code
    write(recipe.root, {"actors/judge/any_change.py": judge})
    assert not recipe.is_reached()
    name = "actors/judge/judges.py"
    imported = "from penstock.actors.judge.any_change import AnyChangeJudge\n"
    edit(recipe.root, name, "from penstock.", f"{imported}from penstock.")
    edit(recipe.root, name, "Judge]] = {\n", f"Judge]] = {{\n    {line}")
    recipe.ends_green("tests/unit/judge")


@pytest.mark.parametrize("recipe", ["A built-in tool"], indirect=True)
def test_a_tool(recipe: Recipe):
    tools, line, words = recipe.code
    tests = "tests/unit/harness/test_harness_wording.py"
    edit(recipe.root, "envs/harness/__init__.py", "HARNESS_VERSION_2)", 'HARNESS_VERSION_2, "3")')
    assert not recipe.test(tests)
    write(recipe.root, {"envs/harness/tools_v3.py": tools})
    name = "envs/harness/tools.py"
    imported = "from penstock.envs.harness.tools_v3 import TOOLS_3\n"
    edit(recipe.root, name, "from penstock.", f"{imported}from penstock.")
    last = "    HARNESS_VERSION_2: TOOLS_2,\n"
    edit(recipe.root, name, last, f"{last}    {line}")
    assert not recipe.test(tests)
    edit(recipe.root, tests, "FROZEN = {\n", f"FROZEN = {{\n    {words}")
    recipe.ends_green("tests/unit/harness", "tests/contract/test_harness_same_bytes.py")


@pytest.mark.parametrize("recipe", ["A sandbox backend"], indirect=True)
def test_a_backend(recipe: Recipe):
    line, backend = recipe.code
    edit(recipe.root, "envs/backends.py", '    "process":', f'    {line}    "process":')
    assert not recipe.test("tests/unit/sandbox/test_sandbox_choice.py")
    write(recipe.root, {"envs/microvm/bubble.py": backend})
    recipe.ends_green("tests/unit/sandbox/test_sandbox_choice.py")
    assert recipe.test("tests/contract/sandbox/test_sandbox_backends.py", "-k", "bubble")


@pytest.mark.parametrize("recipe", ["A loss"], indirect=True)
def test_a_loss(recipe: Recipe):
    line, function = recipe.code
    last = ':decoupled_ppo", ratio_against="proximal"\n    ),\n'
    tests = "tests/property/trainer/test_trainer_losses.py"
    edit(recipe.root, "actors/trainer/objective/registry.py", last, f"{last}{line}")
    assert not recipe.test(tests)
    name, after = "actors/trainer/objective/losses.py", "def _ratio("
    edit(recipe.root, name, after, f"{function}\n\n{after}")
    recipe.ends_green(tests, "tests/unit/trainer/test_trainer_config.py")
