"""Paths of a run: valid wherever its configuration is read again, and refused before the work."""

from pathlib import Path

import pytest

from penstock.infra.config.file import apply_overrides, read_toml
from penstock.infra.export.folder import check_target
from penstock.infra.run.command import parse_new
from penstock.infra.run.hosts import with_whole_paths
from penstock.messages.errors import ConfigError

QUICKSTART = Path("examples/quickstart/config.toml").resolve()


def test_every_path_of_a_new_run_is_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tables = {
        "prepare": {"sources": [{"name": "a", "path": "tasks"}, {"name": "b"}], "num": 1},
        "sandbox_host": {"images": "layers", "checkpoints": ""},
        "judge": {"judges": [{"name": "q", "calibration": "q.json"}]},
        "store": "what is no table",
    }
    found = with_whole_paths(tables)
    sources = [{"name": "a", "path": str(tmp_path / "tasks")}, {"name": "b"}]
    assert found["prepare"] == {"sources": sources, "num": 1}
    assert found["sandbox_host"] == {"images": str(tmp_path / "layers"), "checkpoints": ""}
    assert found["judge"]["judges"] == [{"name": "q", "calibration": str(tmp_path / "q.json")}]
    assert found["store"] == "what is no table"
    assert tables["prepare"]["sources"][0]["path"] == "tasks", "what was given stays as it is"


def test_the_tasks_of_a_run_are_found_from_another_folder(tmp_path, monkeypatch):
    (tmp_path / "here" / "tasks").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    data = apply_overrides(read_toml(QUICKSTART), ["prepare.tasks=tasks"])
    parse_new(data, "test")
    assert data["prepare"]["tasks"] == str(tmp_path / "here" / "tasks")


@pytest.mark.parametrize("below", ["x", "x/y"])
def test_an_output_below_a_file_is_refused_before_anything_is_computed(tmp_path, below):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=r"--output: .*/file is not a folder"):
        check_target(file / below)
    check_target(tmp_path / "new" / below)
