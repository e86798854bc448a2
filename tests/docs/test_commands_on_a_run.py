"""The commands that pages print about a run, executed as printed on a small one."""

import json
import shutil
from pathlib import Path

import pytest
from tests.docs.commands import ROOT, SLOW, Command, commands, penstock_words
from tests.e2e.launched import Launched, penstock

pytestmark = pytest.mark.slow

OUTPUTS = {"DIR", "OUT", "model", "v0", "rloo", "ppo", "short"}
"""Folders that more than one page writes."""


def words_of(command: Command, number: int, episode: str) -> list[str]:
    """Return the arguments, placeholders filled in."""
    known = {"RUN": "r1", "base": "r1", "sft": "r1", "U": "user-0", "EPISODE": episode}
    words = [known.get(word, word) for word in penstock_words(command)]
    return [f"{word}-{number}" if word in OUTPUTS else word for word in words]


def failures(folder: Path) -> list[str]:
    """Execute every command in a folder with `runs/r1`; return those that failed, in words."""
    found: list[str] = []
    about_a_run = [each for each in commands() if each.text.startswith(SLOW)]
    about_a_run.sort(key=lambda each: each.text.startswith("penstock erase"))
    told = penstock(Path("runs"), "log", "cat", "r1", "--type", "RolloutFinished")
    episode = json.loads(told.stdout.splitlines()[0])["rollout_id"]
    for number, command in enumerate(about_a_run):
        words, runs = words_of(command, number, episode), Path("runs")
        if "--workspace" in words:
            Path(words[words.index("--workspace") + 1]).mkdir()
        if words[0] == "--runs-dir":
            runs, words = Path(words[1]), words[2:]
        done = penstock(runs, *words, wait_s=500.0)
        if done.returncode != 0:
            found.append(f"{command.name}\n{done.stdout[-900:]}{done.stderr[-900:]}")
    return found


@pytest.mark.timeout(3600)
def test_commands_about_a_run_work_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "infra").symlink_to(ROOT / "infra")
    (tmp_path / "runs").mkdir()
    launched = Launched(tmp_path / "runs", "run.wall_s_max=900")
    assert launched.wait(1000.0) == 0, launched.output
    monkeypatch.chdir(tmp_path)
    probe = penstock(Path("runs"), "fidelity", "probe", "--backend", "uml", "-o", "b.json")
    assert probe.returncode == 0, probe.stderr
    shutil.copy("b.json", "a.json")
    assert not failures(tmp_path)
