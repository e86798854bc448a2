"""A run that is up is copied, made again, and moved to three servers: nothing changes its place."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli_w
from tests.contract.bus.nats_cluster import NatsCluster
from tests.lab.age.aged_log import AgedLog

from penstock.infra.backup.command import backup_command, move_command, restore_command
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.server.server import EmbeddedServer
from penstock.infra.run.runs import RunDir, open_log
from penstock.messages.base import FORMAT, Event
from penstock.messages.bus import Delivery
from penstock.messages.control import RunStarted
from penstock.messages.errors import BusError, CorruptDataError
from penstock.messages.feedback import FeedbackReceived, InferenceRecorded, LiveSampleJoined
from penstock.messages.training import BatchManifest, StepCompleted

TYPES: tuple[type[Event], ...] = (
    InferenceRecorded,
    FeedbackReceived,
    LiveSampleJoined,
    BatchManifest,
    StepCompleted,
)
CONFIG = {
    "regions": [{"name": "west", "serves": ["train", "eval", "live"]}],
    "processes": {"all": ["trainer"]},
}


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[tuple[RunDir, NatsBus]]:
    """A run that is up, with a log and some objects."""
    run = RunDir(tmp_path / "runs" / "r1")
    run.path.mkdir(parents=True)
    run.config.write_text(tomli_w.dumps(CONFIG))
    (run.path / "master_key").write_text("ab" * 32 + "\n")
    server = EmbeddedServer(store_dir=run.events)
    await server.start()
    bus = await NatsBus.connect(
        server.url, run_id="r1", store=run.store(), name="t", inline_bytes=1000
    )
    await bus.provision()
    started = RunStarted(
        run_id="r1", seed=0, config_toml=run.config.read_text(), versions={}, format=FORMAT
    )
    await bus.publish([started, *(event for event, _ in AgedLog(600, per_minute=2.0))])
    run.write_state(server.url)
    yield run, bus
    await bus.close()
    await server.stop()


def arguments(runs_dir: Path, **fields: object) -> SimpleNamespace:
    return SimpleNamespace(runs_dir=runs_dir, run="r1", config=None, **fields)


async def read(bus: NatsBus) -> list[Delivery]:
    return [one async for one in bus.follow(TYPES, stop_at_end=True)]


async def test_a_live_run_is_copied_while_it_is_written_and_made_again(live, tmp_path, capsys):
    run, bus = live
    before = await read(bus)
    later = [event for event, _ in AgedLog(900, per_minute=2.0)]

    async def write() -> None:
        for event in later:
            await bus.publish([event])

    writing = asyncio.create_task(write())
    await asyncio.sleep(0.2)
    await backup_command(arguments(tmp_path / "runs", output=tmp_path / "backup"))
    await writing
    await restore_command(arguments(tmp_path / "again", folder=tmp_path / "backup"))
    assert "keep it as you keep those" in capsys.readouterr().out
    made = RunDir(tmp_path / "again" / "r1")
    async with open_log(made, "check") as copy:
        found = await read(copy)
        assert found[: len(before)] == before, "each at its sequence and time"
        records = [one.event for one in found if isinstance(one.event, InferenceRecorded)]
        for record in records:
            for key in record.object_keys():
                assert await made.store().exists(key)
        joined = {one.event.key() for one in found if isinstance(one.event, LiveSampleJoined)}
        for one in found:
            if isinstance(one.event, BatchManifest):
                assert {f"{e.rollout_id}.{e.revision}" for e in one.event.live} <= joined
        receipts = await copy.publish([before[0].event])
        assert receipts[0].is_duplicate, "what was stored once is refused again"
    assert (made.path / "master_key").read_text() == (run.path / "master_key").read_text()


async def test_a_damaged_backup_makes_nothing(live, tmp_path):
    await backup_command(arguments(tmp_path / "runs", output=tmp_path / "backup"))
    chunks = tmp_path / "backup" / "streams" / "feedback.chunks"
    chunks.write_bytes(chunks.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptDataError, match=r"feedback\.chunks"):
        await restore_command(arguments(tmp_path / "again", folder=tmp_path / "backup"))
    assert not (tmp_path / "again" / "r1").exists()
    with pytest.raises(FileExistsError):
        await backup_command(arguments(tmp_path / "runs", output=tmp_path / "backup"))


async def test_a_run_moves_from_one_server_to_three(live, tmp_path):
    _, bus = live
    whole = await read(bus)
    await backup_command(arguments(tmp_path / "runs", output=tmp_path / "backup"))
    await restore_command(arguments(tmp_path / "down", folder=tmp_path / "backup"))
    cluster = NatsCluster(tmp_path / "cluster")
    await cluster.start_all()
    try:
        file = tmp_path / "servers.toml"
        section = {"servers": cluster.servers, "num_replicas": 3, "max_bytes": 1 << 30}
        file.write_text(tomli_w.dumps({"bus": section}))
        await move_command(arguments(tmp_path / "down", to_servers=file))
        made = RunDir(tmp_path / "down" / "r1")
        async with open_log(made, "check") as moved:
            assert await read(moved) == whole
            info = await cluster.ask(0, "$JS.API.STREAM.INFO.PS_FEEDBACK")
            assert info["config"]["num_replicas"] == 3
        assert (made.path / "events-before-move").is_dir()
        with pytest.raises(BusError, match="expected an embedded server"):
            await move_command(arguments(tmp_path / "down", to_servers=file))
    finally:
        cluster.stop()
