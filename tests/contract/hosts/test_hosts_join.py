"""A run whose log is on servers of others: read from any host, joined by any process."""

import asyncio
import json
import re

import pytest
import tomli_w
from tests.contract.bus.plain_server import plain_server
from tests.support.memory_bus.bus import MemoryBus
from tests.support.memory_bus.server import MemoryServer

from penstock.actors.runtime.clock import SystemClock
from penstock.infra.bus.jetstream import provision
from penstock.infra.bus.jetstream.access import open_access
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.settings import BusSection
from penstock.infra.cli import main
from penstock.infra.run import liveness
from penstock.infra.run.liveness import answer, check_alone, until_closed, until_open
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.base import FORMAT
from penstock.messages.control import RunClosed, RunFinished, RunOpened, RunStarted
from penstock.messages.errors import BusError, DeadlineError

SECRET = "s3cret-of-the-server"
RUN = "r1"
PROCESSES = {
    "trainer": ["trainer"],
    "rest": ["relay:west", "generator:west", "sandbox_host", "judge", "rollout_worker", "pacer"],
}
REGION = {"name": "west", "serves": ["train", "eval", "live"]}
LOST = 2
"""Exit code of a command that says what is wrong."""


@pytest.fixture
def site(tmp_path):
    """Serve a log that holds one run; yield the table `[bus]` that reaches it."""
    token = tmp_path / "token"
    token.write_text(SECRET)
    config = f'authorization {{ token: "{SECRET}" }}\njetstream {{ store_dir: "{tmp_path}/js" }}'
    with plain_server(tmp_path / "nats", config) as port:
        servers = [f"nats://127.0.0.1:{port}"]
        bus = {"servers": servers, "token_file": str(token), "max_bytes": 1 << 26}
        asyncio.run(fill(bus))
        yield bus


def recorded(bus: dict) -> dict:
    examples = "penstock.examples.quickstart"
    source = {"name": "ladder", "kind": "own", "make": f"{examples}:ladder_tasks"}
    prepare = {"sources": [source], "corpora": {"make": f"{examples}:ladder_corpora"}}
    return {
        "processes": PROCESSES,
        "regions": [REGION],
        "bus": bus,
        "prepare": prepare,
        "trainer": {"steps_max": 3},
    }


async def fill(bus: dict) -> None:
    access = open_access(BusSection(**bus))
    log = await NatsBus.connect(access, run_id=RUN, store=MemoryStore(), name="launcher")
    await log.provision()
    started = RunStarted(
        run_id=RUN, seed=3, config_toml=tomli_w.dumps(recorded(bus)), versions={}, format=FORMAT
    )
    closed = RunClosed(incarnation="i", is_complete=True)
    finished = RunFinished(reason="done", step=3)
    await log.publish([started, RunOpened(incarnation="i"), finished, closed])
    await log.close()


async def publish(bus: dict, event: RunOpened) -> None:
    access = open_access(BusSection(**bus))
    log = await NatsBus.connect(access, run_id=RUN, store=MemoryStore(), name="launcher")
    await log.publish([event])
    await log.close()


def host_file(folder, **tables) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "host.toml").write_text(tomli_w.dumps(tables))
    return str(folder / "host.toml")


def test_commands_in_the_launchers_folder_read_the_servers(site, tmp_path, capsys):
    """They read an empty embedded log before."""
    folder = tmp_path / "runs" / RUN
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(tomli_w.dumps(recorded(site)))
    runs = ["--runs-dir", str(tmp_path / "runs")]
    assert main([*runs, "log", "cat", RUN]) == 0
    kinds = [json.loads(line)["type"] for line in capsys.readouterr().out.splitlines()]
    assert kinds == ["RunStarted", "RunOpened", "RunFinished", "RunClosed"]
    assert main([*runs, "status", RUN, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["phase"] == "finished"
    assert main([*runs, "log", "export", RUN, "-o", str(tmp_path / "out")]) == 0
    assert "4 events" in capsys.readouterr().out
    assert not (folder / "events").exists()


@pytest.mark.parametrize("name", [RUN, "latest"])
def test_another_host_reads_a_run_and_keeps_no_secret(site, tmp_path, capsys, name):
    file = host_file(tmp_path / "other", bus=site)
    runs = ["--runs-dir", str(tmp_path / "other" / "runs")]
    assert main([*runs, "status", name, "--config", file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["run_id"] == RUN
    assert main([*runs, "log", "cat", RUN, "--type", "RunStarted"]) == 0
    assert json.loads(capsys.readouterr().out)["seed"] == 3
    for path in (tmp_path / "other").rglob("*"):
        assert not path.is_file() or SECRET not in path.read_text(errors="replace"), path


def test_objects_of_a_run_that_is_up_are_collected_with_their_grace_alone(site, tmp_path, capsys):
    """An event on its way names objects that no stored one does."""
    file = host_file(tmp_path / "other", bus=site)
    runs = ["--runs-dir", str(tmp_path / "other" / "runs")]
    collecting = [*runs, "log", "collect", RUN, "--config", file, "--grace-s"]
    assert main([*collecting, "0"]) == 0
    asyncio.run(publish(site, RunOpened(incarnation="j")))
    assert main([*collecting, "0"]) == LOST
    assert_matches(capsys.readouterr().err, r"--grace-s: .*is up: expected at least 3600, got 0")
    assert main([*collecting, "3600"]) == 0


def test_a_launcher_that_was_killed_is_not_waited_for(site, tmp_path, capsys, monkeypatch):
    """It left the run open; `top` went on for ever."""
    monkeypatch.setattr(liveness, "ANSWER_S", 0.3)
    file = host_file(tmp_path / "other", bus=site)
    runs = ["--runs-dir", str(tmp_path / "other" / "runs")]
    asyncio.run(publish(site, RunOpened(incarnation="j")))
    assert main([*runs, "top", RUN, "--config", file]) == 0
    assert main([*runs, "status", RUN, "--config", file, "--json"]) == 0


def test_paths_of_secrets_hold_in_every_folder(site, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = host_file(tmp_path / "other", bus=site | {"token_file": "token"})
    runs = ["--runs-dir", str(tmp_path / "other" / "runs")]
    assert main([*runs, "status", RUN, "--config", file, "--json"]) == 0
    monkeypatch.chdir("/")
    assert main([*runs, "status", RUN, "--json"]) == 0


@pytest.mark.parametrize(
    ("arguments", "tables", "words"),
    [
        (["status", "r9"], {}, "run 'r9': nats://127.0.0.1:.* has no log of it"),
        (["status", RUN], {"trainer": {"steps_max": 4}}, "trainer: expected that of the run"),
        (["status", RUN], {"bus": {}}, r"bus\.servers: expected the servers that hold"),
        (["actor", "judge", "--run", RUN], {}, r'store\.kind: expected "s3" or "jetstream"'),
        (
            ["actor", "generator:west", "--run", RUN],
            {"store": {"kind": "jetstream"}},
            r"regions\.west\.bucket: expected one, or relay:west in the same process",
        ),
        (["run", "--run-id", RUN], {}, f"run {RUN}: exists at nats://.*; resume it"),
    ],
)
def test_what_cannot_be_joined_is_named(site, tmp_path, capsys, arguments, tables, words):
    whole = recorded(site) if arguments[0] == "run" else {"bus": site}
    file = host_file(tmp_path / "other", **(whole | tables))
    runs = ["--runs-dir", str(tmp_path / "other" / "runs")]
    if arguments[0] == "run":  # Without a role that boots machines here.
        arguments = [*arguments, "--set", 'processes.rest=["relay:west","generator:west"]']
    assert main([*runs, *arguments, "--config", file]) == LOST
    assert_matches(capsys.readouterr().err, words)


def assert_matches(text: str, words: str) -> None:
    assert re.search(words, text), text


@pytest.mark.parametrize(
    ("config", "start_s", "words"),
    [
        ("", 1.0, r"bus\.servers: expected JetStream at nats://127"),
        ('authorization { token: "other" }', 15.0, r"bus\.token_file: expected what nats://127"),
        ("jetstream { store_dir: STORE, max_file_store: 1G }", 15.0,
         r"bus\.max_bytes: nats://127"),
    ],
)  # fmt: skip
def test_servers_that_cannot_hold_a_run_leave_nothing_of_it(
    tmp_path, capsys, monkeypatch, config, start_s, words
):
    monkeypatch.setattr(provision, "START_S_MAX", start_s)
    token = tmp_path / "token"
    token.write_text(SECRET)
    with plain_server(tmp_path / "nats", config.replace("STORE", f'"{tmp_path}/js"')) as port:
        bus = {"servers": [f"nats://127.0.0.1:{port}"], "token_file": str(token)}
        processes = {"all": ["trainer", "relay:west", "generator:west"]}
        file = host_file(tmp_path / "other", **(recorded(bus) | {"processes": processes}))
        runs = tmp_path / "other" / "runs"
        assert main(["--runs-dir", str(runs), "run", "--config", file, "--run-id", "new"]) == LOST
        assert_matches(capsys.readouterr().err, words)
        assert not runs.exists()


def test_processes_elsewhere_need_servers_and_a_store(site, tmp_path, capsys):
    runs = ["--runs-dir", str(tmp_path / "runs")]
    for tables, words in (
        (recorded(site), r"store\.kind: expected"),
        ({k: v for k, v in recorded(site).items() if k != "bus"}, r"bus\.servers: expected ser"),
    ):
        file = host_file(tmp_path / "other", **tables)
        assert main([*runs, "run", "--config", file, "--processes", "trainer"]) == LOST
        assert_matches(capsys.readouterr().err, words)
    assert main([*runs, "run", "--config", file, "--processes", "nobody"]) == LOST
    assert_matches(capsys.readouterr().err, "--processes: expected some of trainer, rest")


async def test_a_run_has_one_launcher(monkeypatch):
    monkeypatch.setattr(liveness, "ANSWER_S", 0.2)
    server = MemoryServer(seed=0, clock=SystemClock())
    first, second = (
        MemoryBus(server, run_id=RUN, name=name, store=MemoryStore()) for name in ("a", "b")
    )
    await check_alone(first)
    stop = await first.serve(liveness.LAUNCHER, answer)
    with (
        monkeypatch.context() as patient,
        pytest.raises(BusError, match=f"run {RUN}: a launcher is running it on another host"),
    ):
        patient.setattr(liveness, "ANSWER_S", 20.0)
        await check_alone(second)
    await stop()
    await check_alone(second)


async def test_a_process_works_from_the_opening_to_the_closing_of_its_launcher():
    bus = MemoryBus(
        MemoryServer(seed=0, clock=SystemClock()), run_id=RUN, name="a", store=MemoryStore()
    )
    with pytest.raises(DeadlineError, match="no launcher came up"):
        await until_open(bus, wait_s=0.0)
    await bus.publish([RunOpened(incarnation="1"), RunClosed(incarnation="1", is_complete=False)])
    with pytest.raises(DeadlineError):
        await until_open(bus, wait_s=0.0)
    await bus.publish([RunOpened(incarnation="2")])
    opened_at = await until_open(bus)
    assert opened_at is not None
    closing = asyncio.create_task(until_closed(bus, opened_at))
    await bus.publish([RunOpened(incarnation="3")])  # The second was killed: nothing to stop for.
    await bus.publish([RunClosed(incarnation="3", is_complete=True)])
    assert await closing is True
    assert await until_open(bus, wait_s=1.0) is None
