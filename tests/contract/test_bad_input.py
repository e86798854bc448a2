"""What is broken or hostile is contained and said: an image, a guest, a task, a path."""

import asyncio
import json
import struct

import msgspec
import pytest

from penstock.envs.backends import open_backend
from penstock.envs.microvm.connection import GuestConnection
from penstock.envs.microvm.images.assets import MANIFEST, vm_cache_dir
from penstock.envs.microvm.protocol import GuestRequest
from penstock.envs.sandbox import BackendUnavailable, SandboxDied, SandboxError, SandboxFileError
from penstock.infra.cli import main

BOOT_S = 60.0


async def booted():
    try:
        return await open_backend("uml").start(timeout_s=BOOT_S)
    except BackendUnavailable as missing:
        pytest.skip(str(missing))


@pytest.mark.vm
@pytest.mark.parametrize("content", [b"", bytes(1 << 20), b"no image" * 5000], ids=len)
async def test_a_broken_image_ends_with_the_kernel_s_last_words(tmp_path, content):
    try:
        open_backend("uml")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    for path in vm_cache_dir().iterdir():
        if path.is_file():
            (tmp_path / path.name).symlink_to(path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / "image-broken").write_bytes(content)
    (tmp_path / MANIFEST).unlink()
    (tmp_path / MANIFEST).write_text(json.dumps(manifest | {"image": "image-broken"}))
    with pytest.raises(SandboxDied, match=r"root|panic|mount"):
        await open_backend("uml", cache=tmp_path).start(timeout_s=BOOT_S)


@pytest.fixture
async def line():
    """A connection to a guest that says whatever a test wants."""
    near, far = asyncio.get_running_loop().create_future(), []

    async def guest(reader, writer):
        far.append(writer)
        near.set_result(None)

    server = await asyncio.start_server(guest, "127.0.0.1", 0)
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: GuestConnection(lambda: "gone"), *server.sockets[0].getsockname()
    )
    await near

    def say(**fields):
        body = msgspec.msgpack.encode({"v": 1, "id": 0, "credit": 0} | fields)
        far[0].write(struct.pack("<I", len(body)) + body)

    yield connection, say, far[0]
    connection.abort()
    far[0].close()
    server.close()
    await connection.lost


async def test_a_guest_that_announces_an_oversized_frame_is_cut_off(line):
    connection, _, writer = line
    writer.write(struct.pack("<I", 5 << 20))
    with pytest.raises(SandboxDied, match="frame of 5242880 bytes"):
        await connection.ready


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ({"credit": 1 << 40}, "confirmed"),
        ({"exit_code": "zero"}, "invalid reply"),
        ({"files": [[b"x"]]}, "invalid reply"),
        ({"stream": 1, "data": b"x"}, "not opened"),
    ],
)
async def test_a_guest_that_lies_is_cut_off(line, lie, words):
    connection, say, _ = line
    waiting = asyncio.create_task(connection.call(GuestRequest(op="ping"), timeout_s=10.0))
    await asyncio.sleep(0)
    say(**lie)
    with pytest.raises(SandboxDied, match=words):
        await waiting


async def test_a_guest_that_answers_for_another_request_is_not_believed(line):
    connection, say, _ = line
    waiting = asyncio.create_task(connection.call(GuestRequest(op="ping"), timeout_s=10.0))
    await asyncio.sleep(0)
    say(id=77, exit_code=0, stdout=b"forged")
    with pytest.raises(SandboxDied, match="77, which nobody sent"):
        await waiting


@pytest.mark.vm
@pytest.mark.parametrize(
    "script",
    [
        pytest.param("b() { b | b & }; b; sleep 0.3", id="fork bomb", marks=pytest.mark.slow),
        pytest.param("cat /dev/zero > big; rm -f big", id="disk fill"),
        pytest.param("i=0; while [ $i -lt 5000 ]; do : > f$i || break; i=$((i+1)); done; rm -f f*",
                     id="a great many files", marks=pytest.mark.slow),
        pytest.param("head -c 1G /dev/zero | tail", id="memory", marks=pytest.mark.slow),
        pytest.param("yes | head -c 50000000", id="flood of output", marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.timeout(240)
async def test_a_hostile_program_leaves_its_machine_or_ends_it_typed(script):
    machine, neighbor = await booted(), await booted()
    try:
        try:
            await machine.exec(["sh", "-c", script], timeout_s=20.0)
            await machine.exec(["sh", "-c", "kill -9 -1"], timeout_s=20.0)
            assert (await machine.exec(["echo", "on"], timeout_s=60.0)).stdout == b"on\n"
        except SandboxError:
            assert not machine.alive
        assert (await neighbor.exec(["echo", "fine"], timeout_s=60.0)).stdout == b"fine\n"
    finally:
        await machine.close()
        await neighbor.close()


@pytest.mark.vm
async def test_no_link_makes_the_agent_read_or_write_for_a_program():
    machine = await booted()
    try:
        script = (
            "ln -s /etc/passwd account; ln -s /etc shelf; ln -s /proc/1/environ secret; "
            "ln -s /sbin/penstock-agent agent; ln -s /nowhere/x lost"
        )
        assert (await machine.exec(["sh", "-c", script], timeout_s=30.0)).exit_code == 0
        for path in ("account", "shelf/passwd", "shelf/new", "agent", "lost", "/etc/new"):
            with pytest.raises(SandboxFileError):
                await machine.write_files({path: b"root::0:0::/:/bin/sh\n"})
        with pytest.raises(SandboxFileError):
            await machine.read_file("secret", 100)
        before = (await machine.exec(["sha256sum", "/etc/passwd"], timeout_s=30.0)).stdout
        await machine.exec(["sh", "-c", "echo x >> account"], timeout_s=30.0)
        assert (await machine.exec(["sha256sum", "/etc/passwd"], timeout_s=30.0)).stdout == before
        await machine.write_files({"plain": b"1", "/tmp/deep/er": b"2", "/home/agent/x": b"3"})
        said = await machine.exec(["stat", "-c", "%u:%g", "plain", "/tmp/deep"], timeout_s=30.0)
        assert said.stdout == b"1000:1000\n1000:1000\n"
    finally:
        await machine.close()


def test_a_malformed_task_is_one_clear_line(tmp_path, capsys):
    folder = tmp_path / "set" / "task"
    folder.mkdir(parents=True)
    (folder / "task.toml").write_text("version = 3")
    (folder / "instruction.md").write_text("x")
    assert main(["tasks", "check", str(tmp_path / "set")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "task.toml: version: expected '1.x', got 3" in said


def test_a_task_s_path_that_leads_out_is_refused(tmp_path, capsys):
    folder = tmp_path / "set" / "task"
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text('version = "1.0"')
    (folder / "instruction.md").symlink_to("/etc/passwd")
    assert main(["tasks", "check", str(tmp_path / "set")]) == 2
    assert "instruction.md: a link, or out of the task's folder" in capsys.readouterr().err
