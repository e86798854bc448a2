"""Sandbox hosts and rollout workers wait for a build that is under way, and for no other."""

import asyncio
import fcntl
import subprocess
import sys
from pathlib import Path

from penstock.actors.policy.tokenizer import TOKENIZER_KEY, train_tokenizer
from penstock.envs.microvm.images.assets import BUILD_LOCK, is_build_running, wait_for_build
from penstock.envs.microvm.recipe.steps import build_lock
from penstock.infra.config.file import load_config
from penstock.infra.run.roles import Assembly, build_actors
from penstock.infra.run.runs import RunDir
from penstock.infra.stores.memory import MemoryStore

HOLD = (
    "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX);"
    "print('held', flush=True); time.sleep(60)"
)


async def test_it_waits_until_the_builder_ends(tmp_path):
    assert not is_build_running(tmp_path)
    await wait_for_build(tmp_path)  # nobody builds
    command = [sys.executable, "-c", HOLD, str(tmp_path / BUILD_LOCK)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == b"held\n"
        assert is_build_running(tmp_path)
        waiting = asyncio.create_task(wait_for_build(tmp_path))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        builder.kill()
        await waiting


async def test_a_rollout_worker_takes_up_nothing_before_machines_can_be(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    (tmp_path / "vm").mkdir()
    store, config = MemoryStore(), load_config(Path("tests/e2e/tiny.toml"))
    text = train_tokenizer(["def f(x): return x"], 400).to_json()
    await store.put(TOKENIZER_KEY, text.encode())
    assembly = Assembly(run=RunDir(tmp_path / "r"), config=config, bus=None, store=store)
    with build_lock(tmp_path / "vm", print):
        building = asyncio.create_task(build_actors("rollout_worker", assembly))
        await asyncio.sleep(1.0)
        assert not building.done()
    [(name, worker)] = await asyncio.wait_for(building, 20.0)
    assert name == worker.role == "rollout_worker"


def test_the_lock_is_the_builders_own(tmp_path):
    with build_lock(tmp_path, print), (tmp_path / BUILD_LOCK).open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return
    raise AssertionError("the lock is free while somebody builds")
