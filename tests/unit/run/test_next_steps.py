"""What a run prints at its end are commands that this program takes."""

import shlex
import sys

from penstock.infra import cli
from penstock.infra.run.closing import next_steps
from penstock.infra.run.runs import RunDir


def test_each_next_step_is_a_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bin" / "penstock")])
    _, *lines = next_steps(RunDir(tmp_path / "runs" / "r1"))
    assert lines
    for line in lines:
        program, *words = shlex.split(line.partition("#")[0])
        assert program == "bin/penstock"
        arguments = cli.make_parser().parse_args(words)
        assert arguments.runs_dir.name == "runs"
        assert "r1" in vars(arguments).values()
