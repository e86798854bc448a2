"""Every command that README and docs print: the parser takes it, and it is executed or listed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.docs.commands import (
    EXECUTED,
    NOT_RUN,
    PROGRAM,
    ROOT,
    Command,
    blocks,
    commands,
    execute,
    lab_words,
    pages,
    penstock_words,
)
from tests.docs.judge import judging
from tests.lab.__main__ import load_program
from tests.lab.__main__ import make_parser as make_lab_parser

from penstock.infra.cli import make_parser
from penstock.infra.config.file import load_config
from penstock.messages.errors import ConfigError

COMMANDS = commands()


def named(*beginnings: str) -> list[Command]:
    return [each for each in COMMANDS if each.text.startswith(beginnings)]


def test_blocks_of_commands_are_marked_as_shell():
    unmarked = [
        f"{page.name}:{line}"
        for page in pages()
        for line, language, content in blocks(page)
        if language != "sh" and any(PROGRAM.match(each) for each in content.splitlines())
    ]
    assert not unmarked, "blocks with commands begin with ```sh"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: each.name)
def test_each_command_is_executed_or_says_why_not(command: Command):
    assert command.text.startswith((*EXECUTED, *NOT_RUN)), "neither executed nor in NOT_RUN"


@pytest.mark.parametrize("reason", NOT_RUN.values())
def test_tests_that_reasons_name_exist(reason: str):
    assert all((ROOT / each).exists() for each in re.findall(r"tests/[\w/.]+", reason))


@pytest.mark.parametrize("beginning", [*EXECUTED, *NOT_RUN])
def test_no_entry_is_of_a_command_that_no_page_prints(beginning: str):
    assert named(beginning)


@pytest.mark.parametrize(
    "command", [each for each in COMMANDS if penstock_words(each)], ids=lambda each: each.name
)
def test_the_parser_takes_each_command(command: Command):
    arguments = make_parser().parse_args(penstock_words(command))
    config = getattr(arguments, "config", None)
    if config is None or not str(config).startswith(("infra/", "examples/quickstart/")):
        return
    overrides = list(getattr(arguments, "overrides", []))
    if any(each.startswith("model.checkpoint=") for each in overrides):
        return  # what fits is up to the folder's model
    load_config(ROOT / config, overrides)


@pytest.mark.parametrize(
    "command", [each for each in COMMANDS if lab_words(each)], ids=lambda each: each.name
)
def test_the_laboratorys_parsers_take_each_command(command: Command):
    name, *words = lab_words(command)
    arguments = make_lab_parser(name, load_program(name)).parse_args(words)
    if (config := getattr(arguments, "config", None)) is not None:
        load_config(ROOT / config)


@pytest.mark.parametrize(
    "table",
    [
        pytest.param(content, id=f"{page.name}:{line}")
        for page in pages()
        for line, language, content in blocks(page)
        if language == "toml"
    ],
)
def test_settings_that_pages_print_are_settings(table: str, tmp_path: Path):
    """What else a table needs, e.g. a checkpoint or another region, is up to its user."""
    for folder in ("infra", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    base = "" if table.startswith("base = ") else 'base = "examples/quickstart/config.toml"\n'
    path = tmp_path / "page.toml"
    path.write_text(base + table)
    try:
        load_config(path)
    except ConfigError as error:
        assert "unknown field" not in str(error)
        assert "not TOML" not in str(error)


@pytest.mark.parametrize("command", named("make "), ids=lambda each: each.name)
def test_make_has_each_target(command: Command):
    target = command.words[1]
    assert re.search(rf"^{target}:.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_every_command_of_penstock_is_in_the_list_of_commands():
    text = (ROOT / "docs" / "commands.md").read_text()
    [choices] = [each.choices for each in make_parser()._actions if isinstance(each.choices, dict)]
    assert not [name for name in choices if not re.search(rf"^penstock {name}\b", text, re.M)]


def test_weights_commands_work_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    base = torch.arange(4096, dtype=torch.bfloat16)
    for number, name in enumerate(("BASE", "NEXT", "LATER")):
        save_file({"w": base + number}, tmp_path / name)
    execute("penstock weights diff NEXT LATER -o NEXT_DELTA")
    for command in named("penstock weights"):
        if "-o" in command.words:  # pages write files of the same names
            Path(command.words[command.words.index("-o") + 1]).unlink(missing_ok=True)
        execute(command)
    assert Path("changes.svg").exists()


def test_the_environment_is_activated_as_printed():
    if not (ROOT / ".venv").exists():
        pytest.skip("the tests run in another environment than make's")
    [command] = named(". ")
    line = f"{command.text} && command -v penstock"
    done = subprocess.run(["/bin/sh", "-c", line], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout.endswith(b"/.venv/bin/penstock\n")


@pytest.mark.timeout(180, func_only=True)  # Another process, which imports torch.
def test_a_new_projects_tests_pass_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    execute("penstock init my-project")
    [enter], [test] = named("cd my-project"), named("python -m pytest")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["/bin/sh", "-c", f"{enter.text} && {test.text}"], capture_output=True, text=True,
        env=os.environ | {"PATH": path}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_a_judge_is_attacked_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_KEY", "sk-of-the-page")
    for folder in ("infra", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    with judging(tmp_path):
        for command in named("penstock judge attack"):
            execute(command, CONFIG="judged.toml")


def test_weights_are_simulated_as_printed():
    for command in named("python -m tests.lab simulate-weights"):
        execute(f"{command.text} --steps 2 --replicas 8 --ranks 8")  # Of 1,000 and 512.


def test_other_commands_without_a_run_work_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for folder in ("infra", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    for command in named("penstock images ls", "penstock deploy render"):
        shutil.rmtree("deploy", ignore_errors=True)
        execute(command, IMAGE="registry.example/penstock")
    for command in named("penstock init"):
        shutil.rmtree(command.words[2], ignore_errors=True)
        execute(command)
        assert Path(command.words[2], "config.toml").exists()
