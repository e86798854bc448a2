"""A sandbox host waits for a build that is under way, and for no other."""

import asyncio
import fcntl
import subprocess
import sys

from penstock.envs.microvm.images.assets import BUILD_LOCK, is_being_built, until_built
from penstock.envs.microvm.recipe.steps import build_lock

HOLD = (
    "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX);"
    "print('held', flush=True); time.sleep(60)"
)


async def test_it_waits_until_the_builder_ends(tmp_path):
    assert not is_being_built(tmp_path)
    await until_built(tmp_path)  # nobody builds
    command = [sys.executable, "-c", HOLD, str(tmp_path / BUILD_LOCK)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == b"held\n"
        assert is_being_built(tmp_path)
        waiting = asyncio.create_task(until_built(tmp_path))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        builder.kill()
        await waiting


def test_the_lock_is_the_builders_own(tmp_path):
    with build_lock(tmp_path, print), (tmp_path / BUILD_LOCK).open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return
    raise AssertionError("the lock is free while somebody builds")
