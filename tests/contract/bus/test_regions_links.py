"""Links as they are: real namespaces, devices, leaf nodes; and nothing is left of them."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.lab.regions.emulation import Emulation, Linked
from tests.lab.regions.leaf import leaf_node
from tests.lab.regions.links import (
    LinkError,
    free_port,
    free_subnet,
    open_proxy,
    open_tunnel,
    probe_namespaces,
)
from tests.lab.regions.settings import LinkSection

from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.server.server import EmbeddedServer, find_server
from penstock.infra.stores.jetstream import JetStreamStore
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.control import ActorStarted
from penstock.messages.errors import DeadlineError

pytestmark = pytest.mark.timeout(300)
_obstacles: list[str] = []
LINK = LinkSection(bandwidth_mbit_s=80.0, rtt_ms=60.0)
NUM_BYTES = 1_000_000
DIAL = """
import socket, sys, time
host, port = sys.argv[1].split(":")
began = time.monotonic()
hub = socket.create_connection((host, int(port)))
connected = time.monotonic()
received = 0
while piece := hub.recv(1 << 16):
    received += len(piece)
print(connected - began, time.monotonic() - connected, received)
"""
KILLED = """
import asyncio, sys
from pathlib import Path
from tests.lab.regions.emulation import Emulation, Linked
from tests.lab.regions.settings import LinkSection
from penstock.infra.stores.jetstream import JetStreamStore
from penstock.infra.bus.server.server import EmbeddedServer

async def main(folder):
    link = LinkSection(bandwidth_mbit_s=100.0, rtt_ms=1.0)
    emulation = Emulation([Linked(name="far", link=link)], folder)
    async with emulation.links(print) as listen:
        server = EmbeddedServer(store_dir=folder / "hub", leaf_listen=listen)
        await server.start()
        async with emulation.places(server, None) as places:
            print("up", places["far"].entrance[1].split("/")[2], flush=True)
            await asyncio.sleep(60)

asyncio.run(main(Path(sys.argv[1])))
"""


async def skip_without_namespaces() -> None:
    if not _obstacles:
        _obstacles.append(await probe_namespaces())
    if _obstacles[0]:
        pytest.skip(_obstacles[0])


@pytest.fixture(params=["tunnel", "proxy"])
async def link(request):
    port = free_port()
    if request.param == "proxy":
        opening = open_proxy(0, LINK, port)
    else:
        await skip_without_namespaces()
        opening = open_tunnel(await free_subnet(), 0, LINK, port)
    async with opening as opened:
        host = opened.hub_address.partition(":")[0]
        yield opened, host, port


async def dial(opened) -> tuple[float, float, int]:
    """Connect from the region to the hub and read to the end."""
    entrance = []
    if opened.namespace_pid:
        entrance = ["nsenter", f"--net=/proc/{opened.namespace_pid}/ns/net", "--"]
    process = await asyncio.create_subprocess_exec(
        *entrance, sys.executable, "-c", DIAL, opened.hub_address, stdout=subprocess.PIPE
    )
    async with asyncio.timeout(120):
        output, _ = await process.communicate()
    connect_s, read_s, received = output.split()
    return float(connect_s), float(read_s), int(received)


async def test_bytes_cross_whole_and_no_faster_than_the_link(link):
    opened, host, port = link

    async def serve(reader, writer):
        writer.write(bytes(NUM_BYTES))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, host, port):
        connect_s, read_s, received = await dial(opened)
    assert received == NUM_BYTES
    assert connect_s + read_s >= LINK.delay_s + NUM_BYTES / LINK.bytes_per_s


async def test_an_actor_behind_a_link_has_the_whole_bus(link, tmp_path):
    opened, host, port = link
    server = EmbeddedServer(store_dir=tmp_path / "hub", leaf_listen=f"{host}:{port}")
    await server.start()
    node = leaf_node(tmp_path / "far", find_server(None), opened, server.token)
    async with node as far:
        place = far.place
        hub = await NatsBus.connect(server.url, run_id="r", store=MemoryStore(), name="hub")
        await hub.provision()
        objects = await JetStreamStore.connect(server.url, "r")
        await objects.put("weights/near", bytes(NUM_BYTES))
        script = (
            "import asyncio, sys\n"
            "from tests.contract.bus.test_regions_links import far_side\n"
            "asyncio.run(far_side(sys.stdin.read()))\n"
        )
        process = await asyncio.create_subprocess_exec(
            *place.entrance, sys.executable, "-c", script,
            stdin=subprocess.PIPE, cwd=Path.cwd(),
        )  # fmt: skip
        async with asyncio.timeout(120):
            await process.communicate(place.url.encode())
        assert process.returncode == 0
        found = await hub.last(ActorStarted)
        assert found is not None
        assert found.event == ActorStarted(actor="far", incarnation="2", pid=1)
        assert await objects.get("weights/far") == bytes(NUM_BYTES // 2)
        await objects.close()
        await hub.close()
    await server.stop()


async def far_side(url: str) -> None:
    """Publish twice and read both back; fetch an object and store another, from the region."""
    bus = await NatsBus.connect(url, run_id="r", store=MemoryStore(), name="far")
    sent = [ActorStarted(actor="far", incarnation=str(i), pid=1) for i in (1, 2)]
    for event in sent:
        await bus.publish([event])
    read = [d.event async for d in bus.follow([ActorStarted], stop_at_end=True)]
    assert read == sent
    await bus.close()
    objects = await JetStreamStore.connect(url, "r")
    assert await objects.get("weights/near") == bytes(NUM_BYTES)
    await objects.put("weights/far", bytes(NUM_BYTES // 2))
    assert await objects.keys("weights/") == ["weights/far", "weights/near"]
    await objects.close()


async def test_a_region_reaches_the_hub_and_nothing_else(tmp_path):
    await skip_without_namespaces()
    async with open_tunnel(await free_subnet(), 0, LINK, 1) as opened:
        listing = await asyncio.create_subprocess_exec(
            "nsenter", f"--net=/proc/{opened.namespace_pid}/ns/net", "--", "ip", "-brief", "route",
            stdout=subprocess.PIPE,
        )  # fmt: skip
        routes, _ = await listing.communicate()
    host = opened.hub_address.partition(":")[0]
    assert [line.split()[0] for line in routes.decode().splitlines()] == [host]


async def test_a_hub_that_is_not_there_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.lab.regions.leaf.START_S_MAX", 0.5)
    async with open_proxy(0, LINK, free_port()) as opened:
        with pytest.raises(LinkError, match="did not reach the hub"):
            async with leaf_node(tmp_path / "far", find_server(None), opened, "token"):
                pass


async def test_a_leaf_node_that_dies_is_started_again_and_a_link_that_ends_ends_the_run(tmp_path):
    emulation = Emulation([Linked(name="far", link=LINK)], tmp_path / "run7" / "regions")
    ends = r"region far ended; .* --resume run7$|^leaf node of far: did not reach the hub"
    with pytest.raises(LinkError, match=ends):  # The node may still be starting.
        async with emulation.links(lambda line: None) as listen:
            server = EmbeddedServer(store_dir=tmp_path / "hub", leaf_listen=listen)
            await server.start()
            try:
                async with emulation.places(server, None), asyncio.timeout(90):
                    node = emulation.nodes["far"]
                    first = node.pid
                    os.kill(first, signal.SIGKILL)
                    while node.pid == first:
                        await asyncio.sleep(0.05)
                    emulation._links["far"].process.kill()
                    await asyncio.sleep(90)
            finally:
                await server.stop()


async def test_an_error_of_the_run_comes_out_as_it_is(tmp_path):
    server = EmbeddedServer(store_dir=tmp_path)
    with pytest.raises(DeadlineError, match="the run's own"):
        async with Emulation([], tmp_path).places(server, None):
            raise DeadlineError("the run's own")


def test_kill_9_leaves_no_device_and_no_process(tmp_path):
    asyncio.run(skip_without_namespaces())
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    words = next(line.split() for line in process.stdout if line.startswith("up"))
    device = Path(f"/proc/{words[1]}/cmdline").read_text().split('"device":"')[1].split('"')[0]
    assert Path(f"/sys/class/net/{device}").exists()
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 20
    while Path(f"/sys/class/net/{device}").exists() or _mentions(str(tmp_path)):
        assert time.monotonic() < deadline, "something is left"
        time.sleep(0.05)


def _mentions(text: str) -> bool:
    """Return whether a process's command line has the text."""
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in line.read_bytes():
                return True
        except OSError:
            continue
    return False
