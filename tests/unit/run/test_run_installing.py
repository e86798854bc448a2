"""A run that begins while packages are still being installed."""

import asyncio
import subprocess
import sys
import time

import pytest

from penstock.infra.run import liveness
from penstock.infra.run.liveness import until_installed
from penstock.messages.errors import ConfigError, DeadlineError

INSTALL = "import sys, time; time.sleep(0.5); open(sys.argv[1], 'w').close()"


async def test_it_waits_for_the_process_and_finds_what_it_installed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError):
        __import__("installed_late")
    path = tmp_path / "installed_late.py"
    with subprocess.Popen([sys.executable, "-c", INSTALL, str(path)]) as process:
        await asyncio.wait_for(until_installed(process.pid, "installed_late"), 20.0)
        assert path.exists()
        assert __import__("installed_late").__file__ == str(path)


async def test_what_was_not_installed_is_named():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait(20.0)
        with pytest.raises(ConfigError, match="expected it to install no_such_module_here, which"):
            await until_installed(process.pid, "no_such_module_here")


async def test_an_installer_that_never_ends_ends_the_wait(monkeypatch):
    monkeypatch.setattr(liveness, "INSTALL_S_MAX", 0.3)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        began = time.monotonic()
        with pytest.raises(DeadlineError, match=rf"--after {process.pid}: still runs after 0.3 s"):
            await until_installed(process.pid, "asyncio")
        process.kill()
    assert time.monotonic() - began < 20.0


def test_a_run_is_configured_and_prepared_before_torch_is_there():
    code = """
import sys, threading
sys.modules["torch"] = None  # An import of it fails.
from pathlib import Path
from penstock.infra.run.command import parse_new
from penstock.infra.run.config_file import read_toml
from penstock.infra.run.prepare import build
config = parse_new(read_toml(Path("tests/e2e/tiny.toml")), "tiny")
assert build(config, threading.Event())
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
