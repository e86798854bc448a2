"""Programs in real machines and the one way out: allowed hosts, refusals, bounds, copies."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from tests.trajectories import trajectory

from penstock.actors.judge.audit import audit
from penstock.actors.rollout_worker.episode import EpisodeStats
from penstock.envs.backends import open_backend
from penstock.envs.sandbox import BackendUnavailable, NetworkedSandbox, SandboxRequestError
from penstock.envs.tasks.storage import GradedTask
from penstock.envs.tasks.workspace import open_workspace, read_egress
from penstock.messages.reward import CheatKind
from penstock.messages.rollout import EpisodeEnd
from penstock.messages.task import HiddenTests, Purpose, Sampling, Split, StartRollout, Task

pytestmark = [pytest.mark.vm, pytest.mark.timeout(200)]
FETCH = """\
import sys, urllib.error, urllib.request
for url in sys.argv[1:]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            print(answer.status, answer.url, len(answer.read()))
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode().strip())
    except OSError as error:
        print(type(error).__name__, error)
"""


@asynccontextmanager
async def machine(backend):
    try:
        one = await open_backend(backend, allow_process=True).start(timeout_s=200.0)
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    try:
        yield one
    finally:
        await one.close()


@asynccontextmanager
async def web():
    """Serve pages on this host: of any size, a redirect, or what was sent; yield the port."""

    async def serve(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        status, location, body = "200 OK", "", b"x" * int(path.rpartition("/")[2] or 5)
        if path == "/away/0":
            status, location = "302 Found", "location: http://evil.test/\r\n"
        if method == "POST":
            body = await reader.readexactly(
                int(head.lower().split("content-length: ")[1].split()[0])
            )
        answer = f"HTTP/1.1 {status}\r\n{location}content-length: {len(body)}\r\n\r\n"
        writer.write(answer.encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def fetch(sandbox, *urls):
    done = await sandbox.exec(["python3", "-c", FETCH, *urls], timeout_s=120.0)
    assert done.exit_code == 0, done
    return done.stdout.decode().splitlines()


def task_for(port):
    return Task(
        task_id="t", category="bug", split=Split.TRAIN, instruction="Fetch it",
        files={"a.py": "1\n"},
        egress=[f"good.test:{port}@127.0.0.1", "name.invalid:80"],
    )  # fmt: skip


async def prepare(sandbox, task):
    """Open a workspace where the host's operator allows addresses."""
    await sandbox.allow_egress(task.egress, allows_addresses=True)
    await open_workspace(sandbox, task, "r", has_git=False)


@pytest.mark.parametrize("backend", ["uml", "process"])
async def test_allowed_hosts_are_reached_and_others_refused_on_record(backend):
    async with web() as port, machine(backend) as sandbox:
        assert isinstance(sandbox, NetworkedSandbox)
        good, task = f"http://good.test:{port}", task_for(port)
        (before,) = await fetch(sandbox, f"{good}/")
        assert "URLError" in before  # no name, no route, no proxy: nothing without a rule
        await prepare(sandbox, task)
        said = await fetch(
            sandbox, f"{good}/", f"{good}/1000000", f"{good}/away/0", "http://evil.test/",
            f"http://2130706433:{port}/", f"http://127.0.0.1:{port}/", "http://name.invalid/",
            "https://evil.test/",
        )  # fmt: skip
        attempts = await read_egress(sandbox, task)
        with pytest.raises(SandboxRequestError, match="set already"):
            await sandbox.allow_egress(["evil.test:80"])
    assert said[0] == f"200 {good}/ 5" and said[1] == f"200 {good}/1000000 1000000"
    assert said[2] == said[3] == "403 egress proxy: evil.test:80: not on the allow-list"
    assert said[4].startswith("403 ") and "not an address" in said[4]
    assert "refused" in said[5]  # the guest's own loopback, not the host's
    assert said[6].startswith("502 ") and "403 Forbidden" in said[7]
    assert [(one.method, one.is_allowed, one.num_attempts) for one in attempts] == [
        ("GET", True, 3), ("GET", False, 2), ("GET", False, 1), ("GET", True, 1),
        ("CONNECT", False, 1),
    ]  # fmt: skip
    assert attempts[0].num_bytes_received > 1_000_000
    findings = audit(finished(attempts), graded(task))
    assert {one.kind for one in findings} == {CheatKind.EGRESS}
    assert "evil.test:80" in findings[0].detail


async def test_names_and_routes_are_as_absent_as_before():
    script = (
        "getent hosts good.test || echo no name; cat /etc/resolv.conf; "
        "cut -d: -f1 -s /proc/net/dev | tr -d ' '; wc -l < /proc/net/route; env | grep -ci proxy"
    )
    async with web() as port, machine("uml") as sandbox:
        await prepare(sandbox, task_for(port))
        done = await sandbox.exec(["sh", "-c", script], timeout_s=60.0)
        assert done.stdout.decode().split() == ["no", "name", "lo", "1", "6"]


async def test_many_connections_at_once_share_the_line_with_commands():
    async with web() as port, machine("uml") as sandbox:
        await prepare(sandbox, task_for(port))
        url = f"http://good.test:{port}/50000"
        said, done = await asyncio.gather(
            asyncio.gather(*(fetch(sandbox, url) for _ in range(4))),
            sandbox.exec(["echo", "fine"], timeout_s=60.0),
        )
    assert said == [[f"200 {url} 50000"]] * 4
    assert done.stdout == b"fine\n"


@pytest.mark.slow
async def test_a_program_that_hangs_up_or_reads_nothing_harms_no_other():
    rude = (
        "import socket, time\n"
        "idle = [socket.create_connection(('127.0.0.1', 3128)) for _ in range(20)]\n"
        "idle[0].sendall(b'GET http://good.test:%d/9000000 HTTP/1.1\\r\\nhost: x\\r\\n\\r\\n')\n"
        "idle[1].sendall(b'\\x00' * 40000)\n"
        "time.sleep(1)\n"
    )
    async with web() as port, machine("uml") as sandbox:
        await prepare(sandbox, task_for(port))
        await sandbox.exec(["python3", "-c", rude % port], timeout_s=60.0)
        url = f"http://good.test:{port}/"
        assert await fetch(sandbox, url) == [f"200 {url} 5"]


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_copy_has_no_way_out_until_its_own_host_opens_one(tmp_path):
    knock = "import socket; socket.create_connection(('127.0.0.1', 3128), 5)"
    async with web() as port, machine("qemu-tcg") as first:
        url, task = f"http://good.test:{port}/", task_for(port)
        await prepare(first, task)
        assert (await fetch(first, "http://evil.test/"))[0].startswith("403 ")
        await first.checkpoint(tmp_path / "saved")
        stats = EpisodeStats(sandbox=first.info)
        stats.add_egress(await read_egress(first, task))
        one_turn = SimpleNamespace(
            turns=[None], observation_ids=[], starts_segment=False, is_summary=False
        )
        saved = stats.saved(start_of(task), one_turn, 0.0)
        copy = await open_backend("qemu-tcg").restore(tmp_path / "saved", timeout_s=200.0)
        try:
            closed = await copy.exec(["python3", "-c", knock], timeout_s=100.0)
            assert b"Connection refused" in closed.stderr
            await copy.allow_egress(task.egress, allows_addresses=True)
            assert await fetch(copy, url) == await fetch(first, url) == [f"200 {url} 5"]
            assert [one.is_allowed for one in await read_egress(copy, task)] == [True]
            stats = EpisodeStats.resumed(copy.info, saved, 0.0)
            stats.add_egress(await read_egress(copy, task))
            assert [one.target for one in stats.egress] == ["evil.test:80", f"good.test:{port}"]
            assert stats.egress == await read_egress(first, task)
        finally:
            await copy.close()


def start_of(task):
    return StartRollout(
        rollout_id="r", group_id="g", group_index=0, group_size=1, member=0,
        purpose=Purpose.TRAIN, task=task, sampling=Sampling(), policy_version=0,
    )  # fmt: skip


def graded(task):
    hidden = HiddenTests(task_id="t", files={}, argv=["true"], expected=["1"])
    return GradedTask(task=task, hidden=hidden)


def finished(attempts):
    return trajectory(
        rollout_id="r", group_id="g", group_index=0, group_size=1, member=0,
        purpose=Purpose.TRAIN, task_id="t", category="bug", end=EpisodeEnd.FINISHED, turns=[],
        egress=attempts,
    )  # fmt: skip
