"""Where the answer to a question goes."""

import argparse
import time

import pytest

from penstock.infra.run.runs import RunDir
from penstock.infra.what_if import command
from penstock.messages.errors import ConfigError


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    found = RunDir(tmp_path / "r1")

    async def reached(_):
        return found

    monkeypatch.setattr(command, "reached_run", reached)
    return found


def test_questions_of_one_second_have_a_folder_each(run):
    folders = [command._own_folder(run) for _ in range(3)]
    assert [folder.name.removeprefix("20260101-000000") for folder in folders] == ["", "-2", "-3"]
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders)
    for _ in range(3, command.NUM_AT_ONCE_MAX):
        command._own_folder(run)
    with pytest.raises(ConfigError, match=r"--output: expected a new folder, .*what-if"):
        command._own_folder(run)


@pytest.mark.parametrize("leaves", ["nothing", "a file"])
async def test_a_question_that_fails_leaves_no_empty_folder(run, monkeypatch, leaves):
    async def fails(_run, _given, folder, *, with_progress):
        if leaves == "a file":
            (folder / "x").touch()
        raise ConfigError("no")

    monkeypatch.setattr(command, "ask", fails)
    with pytest.raises(ConfigError, match="no"):
        await command.what_if_command(argparse.Namespace(output=None, what_if=["a=1"], json=True))
    assert len(list((run.path / "what-if").iterdir())) == (leaves == "a file")
