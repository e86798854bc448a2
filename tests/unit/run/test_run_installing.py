"""A run that begins while packages are still being installed."""

import asyncio
import os
import subprocess
import sys
import time

import pytest

from penstock.infra.run import liveness
from penstock.infra.run.liveness import until_installed
from penstock.messages.errors import ConfigError, DeadlineError

INSTALL = """
import pathlib, sys, time
time.sleep(0.5)
for path in map(pathlib.Path, sys.argv[1:]):
    path.parent.mkdir(exist_ok=True)
    path.write_text("Metadata-Version: 2.1\\nName: installed-late\\nVersion: 1\\n")
    time.sleep(0.2)
"""
PARTS = ("installed_late.py", "installed_late-1.dist-info/METADATA")
LAST = "installed_late-1.dist-info/INSTALLER"


async def test_it_waits_for_the_process_and_finds_what_it_installed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    paths = [str(tmp_path / name) for name in (*PARTS, LAST)]
    with subprocess.Popen([sys.executable, "-c", INSTALL, *paths]) as process:
        await asyncio.wait_for(until_installed(process.pid, "installed_late"), 60.0)
        assert (tmp_path / LAST).exists()


async def test_what_was_installed_in_part_is_not_there(tmp_path, monkeypatch):
    """Its installer was killed, or the disk was full."""
    monkeypatch.syspath_prepend(tmp_path)
    paths = [str(tmp_path / name) for name in PARTS]
    with subprocess.Popen([sys.executable, "-c", INSTALL, *paths]) as process:
        with pytest.raises(ConfigError, match="installed_late, which is missing or incomplete"):
            await asyncio.wait_for(until_installed(process.pid, "installed_late"), 60.0)
        assert (tmp_path / PARTS[0]).exists()


@pytest.mark.parametrize("pid", [0, 1, -1, -(2**63), os.getpid()])
async def test_what_is_no_process_to_wait_for_is_refused(pid):
    with pytest.raises(ConfigError, match=rf"--after: expected the id of .*, got {pid}\Z"):
        await asyncio.wait_for(until_installed(pid, "numpy"), 20.0)


async def test_another_process_with_the_same_id_is_not_waited_for(monkeypatch):
    began = iter([b"100", b"100", b"207"])
    monkeypatch.setattr(liveness, "_began", lambda pid: next(began))
    await asyncio.wait_for(until_installed(2**22 + 1, "numpy"), 20.0)


async def test_a_process_that_never_was_has_ended():
    await asyncio.wait_for(until_installed(10**400, "numpy"), 20.0)


async def test_what_was_not_installed_is_named():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait(20.0)
        with pytest.raises(ConfigError, match="expected it to install no_such_module_here, which"):
            await until_installed(process.pid, "no_such_module_here")


async def test_an_installer_that_never_ends_ends_the_wait(monkeypatch):
    monkeypatch.setattr(liveness, "INSTALL_S_MAX", 0.3)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        began = time.monotonic()
        with pytest.raises(
            DeadlineError, match=rf"--after {process.pid}: still running after 0.3 s"
        ):
            await until_installed(process.pid, "numpy")
        process.kill()
    assert time.monotonic() - began < 20.0


def test_a_run_is_configured_and_prepared_before_torch_is_there():
    code = """
import sys, threading
sys.modules["torch"] = None  # An import of it fails.
from pathlib import Path
from penstock.infra.run.command import parse_new
from penstock.infra.config.file import read_toml
from penstock.infra.run.prepare import build
config = parse_new(read_toml(Path("tests/e2e/tiny.toml")), "tiny")
assert build(config, threading.Event())
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)
