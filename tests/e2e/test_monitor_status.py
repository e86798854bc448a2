"""`penstock status` and `penstock top` of a run whose server is gone."""

from argparse import Namespace

import msgspec
import pytest
from tests.unit.monitor.story import finished, story

from penstock.actors.monitor.state import MonitorState
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.server.server import EmbeddedServer
from penstock.infra.commands.status import status_command, top_command
from penstock.infra.run.runs import RunDir


@pytest.fixture
def run(tmp_path) -> RunDir:
    run = RunDir(tmp_path / "r1")
    run.path.mkdir()
    run.config.write_text("")
    return run


def arguments(run: RunDir, name: str, *, json: bool = False) -> Namespace:
    return Namespace(run=name, runs_dir=run.path.parent, config=None, json=json)


async def record(run: RunDir, events) -> None:
    server = EmbeddedServer(store_dir=run.events)
    await server.start()
    bus = await NatsBus.connect(server.url, run_id="r1", store=run.store(), name="test")
    await bus.provision()
    await bus.publish(events)
    await bus.close()
    await server.stop()


async def test_status_reads_what_the_stopped_server_kept(run, capsys):
    await record(run, story())
    assert await status_command(arguments(run, "r1")) == 0
    assert "r1 · stopped in reinforcement learning · step 2" in capsys.readouterr().out
    assert await status_command(arguments(run, "latest", json=True)) == 0
    state = msgspec.json.decode(capsys.readouterr().out, type=MonitorState)
    assert state.ledger.balanced
    await record(run, [finished()])
    assert await top_command(arguments(run, "r1")) == 0
    assert "finished: step limit" in capsys.readouterr().out
