"""What a run prints at its end are commands that this program takes."""

import shlex
import sys
from pathlib import Path

from penstock.infra import cli
from penstock.infra.config.file import load_config
from penstock.infra.run.closing import next_steps
from penstock.infra.run.runs import RunDir

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart" / "config.toml"


def test_each_next_step_is_a_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bin" / "penstock")])
    _, *lines = next_steps(RunDir(tmp_path / "runs" / "r1"), load_config(QUICKSTART))
    assert lines
    for line in lines:
        program, *words = shlex.split(line.partition("#")[0])
        assert program == "bin/penstock"
        arguments = cli.make_parser().parse_args(words)
        assert arguments.runs_dir.name == "runs"
        assert "r1" in vars(arguments).values()


def test_next_steps_say_where_own_code_was_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["penstock"])
    monkeypatch.setenv("PYTHONPATH", "my parts")
    run = RunDir(tmp_path / "runs" / "r1")
    plain, own = (load_config(QUICKSTART, words) for words in ([], ["judge.judge=own:Looks"]))
    assert all(line.startswith("  penstock ") for line in next_steps(run, plain)[1:])
    assert all(
        line.startswith("  PYTHONPATH='my parts' penstock ") for line in next_steps(run, own)[1:]
    )
