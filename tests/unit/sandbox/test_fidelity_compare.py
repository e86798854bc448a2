import subprocess
import sys

import pytest
from tests.lab.__main__ import main
from tests.lab.fidelity.compare import (
    PROBE_FILE,
    ProbeError,
    compare,
    find_fingerprints,
    read_allowed,
    read_probe,
    run_probe,
)

from penstock.envs.backends import open_backend
from penstock.envs.sandbox import BackendUnavailable


def test_unexplained_differences_come_first_and_reasons_stay():
    found = compare(
        {"a": 1, "timing.x": 2, "same": [1], "gone": True},
        {"a": 2, "timing.x": 3, "same": [1], "new": None},
        {"timing.*": "load"},
    )
    assert [(one.check, one.reason) for one in found] == [
        ("a", ""), ("gone", ""), ("timing.x", "load"),
    ]  # fmt: skip


def test_the_reviewed_list_has_a_reason_for_everything():
    assert all(read_allowed().values())


@pytest.mark.parametrize("text", ["[allowed", "[allowed]\na = 1\n", '[allowed]\na = " "\n'])
def test_a_malformed_allow_list_is_refused(tmp_path, text):
    path = tmp_path / "allowed.toml"
    path.write_text(text)
    with pytest.raises(ProbeError, match=r"allowed\.toml"):
        read_allowed(path)


def test_a_file_that_is_no_probe_is_refused(tmp_path):
    (tmp_path / "p.json").write_text("[1]")
    with pytest.raises(ProbeError, match="expected one JSON object"):
        read_probe(tmp_path / "p.json")


def test_the_command_ends_with_1_on_an_unexplained_difference(tmp_path, capsys):
    (tmp_path / "a").write_text('{"cpu.num": 1, "timing.x": 1}')
    (tmp_path / "b").write_text('{"cpu.num": 1, "timing.x": 2}')
    (tmp_path / "c").write_text('{"cpu.num": 2, "timing.x": 2}')
    assert main(["fidelity", "diff", f"{tmp_path}/a", f"{tmp_path}/b", "--json"]) == 0
    assert main(["fidelity", "diff", f"{tmp_path}/a", f"{tmp_path}/c"]) == 1
    assert "cpu.num: 1 | 2 (UNEXPLAINED)" in capsys.readouterr().out


def test_the_probe_refuses_a_host():
    done = subprocess.run(
        [sys.executable, "-I", "-S", PROBE_FILE], capture_output=True, check=False, timeout=30
    )
    assert done.returncode == 1 and b"in a guest" in done.stderr


def test_fingerprints_are_found_and_a_plain_machine_has_none():
    toy = {"cpu.model": "UML", "cpu.num": 1, "time.git_date": False, "devices.block": ["ubda"]}
    assert [one.check for one in find_fingerprints(toy)] == [
        "cpu.model", "cpu.num", "devices.block", "time.git_date",
    ]  # fmt: skip
    assert find_fingerprints({"cpu.model": "AMD EPYC", "cpu.num": 4, "time.git_date": True}) == []


@pytest.mark.vm
async def test_two_machines_of_one_kind_are_alike():
    try:
        backend = open_backend("uml")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    probes = []
    for _ in range(2):
        machine = await backend.start(timeout_s=60.0)
        try:
            probes.append(await run_probe(machine))
        finally:
            await machine.close()
    assert len(probes[0]) >= 60
    unexplained = [one for one in compare(*probes, read_allowed()) if not one.reason]
    assert unexplained == []
