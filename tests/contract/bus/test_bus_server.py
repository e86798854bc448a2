"""The embedded server: found, started, guarded, and never left behind."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.infra.bus.server.server import EmbeddedServer, find_server
from penstock.messages.errors import BusError, NotFoundError

DEADLINE_S = 60.0


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


async def until_dead(pid: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while is_alive(pid):
            await asyncio.sleep(0.01)


async def test_it_returns_on_its_port_after_a_kill(tmp_path):
    server = EmbeddedServer(store_dir=tmp_path / "nats")
    await server.start()
    url, pid = server.url, server.pid
    await server.start()
    assert server.pid == pid, "a running server is left alone"
    os.kill(pid, signal.SIGKILL)
    assert await asyncio.wait_for(server.wait(), DEADLINE_S) == -signal.SIGKILL
    await server.start()
    assert server.url == url and server.pid != pid
    await server.stop()
    await server.stop()
    assert not is_alive(server.pid)


async def test_the_token_is_for_the_owner_alone(tmp_path):
    server = EmbeddedServer(store_dir=tmp_path / "nats")
    with pytest.raises(BusError, match="start"):
        _ = server.url
    await server.start()
    for name in ("token", "nats.conf"):
        assert stat.S_IMODE((tmp_path / "nats" / name).stat().st_mode) == 0o600
    log = (tmp_path / "nats" / "nats.log").read_text()
    assert (tmp_path / "nats" / "token").read_text() not in log
    await server.stop()


async def test_a_server_left_behind_on_the_store_is_ended(tmp_path):
    first = EmbeddedServer(store_dir=tmp_path / "nats")
    await first.start()
    second = EmbeddedServer(store_dir=tmp_path / "nats")
    await second.start()
    assert not is_alive(first.pid) and is_alive(second.pid)
    await second.stop()
    await first.wait()


async def test_a_pid_file_of_another_program_is_left_alone(tmp_path):
    (tmp_path / "nats").mkdir()
    (tmp_path / "nats" / "nats.pid").write_text(str(os.getpid()))
    server = EmbeddedServer(store_dir=tmp_path / "nats")
    await server.start()
    await server.stop()


async def test_it_dies_with_its_process(tmp_path):
    script = (
        "import asyncio, sys; from pathlib import Path\n"
        "from penstock.infra.bus.server.server import EmbeddedServer\n"
        "async def main():\n"
        "    server = EmbeddedServer(store_dir=Path(sys.argv[1]))\n"
        "    await server.start()\n"
        "    print(server.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    argv = [sys.executable, "-c", script, str(tmp_path / "nats")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(await asyncio.to_thread(parent.stdout.readline))
        assert is_alive(pid)
        parent.kill()
        await until_dead(pid)


async def test_a_port_in_use_is_told_with_the_servers_words(tmp_path):
    first = EmbeddedServer(store_dir=tmp_path / "a")
    await first.start()
    port = int(first.url.rsplit(":", 1)[1])
    second = EmbeddedServer(store_dir=tmp_path / "b", port=port)
    with pytest.raises(BusError, match="address already in use"):
        await second.start()
    await first.stop()


def test_a_missing_or_old_program_is_a_clear_error(tmp_path):
    with pytest.raises(NotFoundError, match="does not run"):
        find_server(tmp_path / "nothing")
    old = tmp_path / "nats-server"
    old.write_text("#!/bin/sh\necho nats-server: v2.10.7\n")
    old.chmod(0o755)
    with pytest.raises(NotFoundError, match=r"v2\.10\.7.*>= 2\.12"):
        find_server(old)
    assert find_server().name == "nats-server"
