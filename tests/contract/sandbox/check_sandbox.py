"""What every sandbox backend must do; `check_sandbox` runs all of it against a factory."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from penstock.envs.sandbox import (
    Machine,
    SandboxDied,
    SandboxFileError,
    SandboxRequestError,
    VerifierRun,
    networked,
    verifying,
)
from penstock.envs.sandbox_client.client import RemoteSandbox
from penstock.messages.sandbox import ExecResult

Factory = Callable[[], Awaitable[Machine]]
DEADLINE_S = 200.0
"""Only what hangs meets it: an emulated processor on a busy host is slow."""


async def until_begun(machine: Machine, argv: list[str], **options) -> ExecResult:
    """Run an endless program until its deadline: one that it meets, and not before it has begun."""
    first_s = 8.0 if machine.info.backend == "qemu-tcg" else 0.3
    for timeout_s in (first_s, 10 * first_s, 30 * first_s):
        result = await machine.exec(argv, timeout_s=timeout_s, **options)
        assert result.timed_out
        if result.stdout:
            return result
    raise AssertionError(f"it says nothing: {result}")


async def sh(machine: Machine, script: str, **options) -> str:
    """Run a shell script that must succeed; return what it printed."""
    result = await machine.exec(["sh", "-c", script], **{"timeout_s": DEADLINE_S} | options)
    assert result.exit_code == 0, result
    return result.stdout.decode()


async def until_fails(machine: Machine, script: str) -> None:
    """Wait until a shell script no longer succeeds."""
    for _ in range(200):
        if (await machine.exec(["sh", "-c", script], timeout_s=DEADLINE_S)).exit_code != 0:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"still true: {script}")


async def record_names_what_ran(machine: Machine) -> None:
    info = machine.info
    assert info.backend
    assert info.isolation_class
    assert info.kernel_digest
    assert info.image_digest
    assert info.boot_ms > 0


async def exec_gives_both_streams_and_the_exit_code(machine: Machine) -> None:
    script = "echo out; echo err >&2; exit 7"
    result = await machine.exec(["sh", "-c", script], timeout_s=DEADLINE_S)
    assert (result.exit_code, result.stdout, result.stderr) == (7, b"out\n", b"err\n")
    assert not result.truncated
    assert not result.timed_out


async def a_signal_gives_its_negative_number(machine: Machine) -> None:
    result = await machine.exec(["sh", "-c", "kill -SEGV $$"], timeout_s=DEADLINE_S)
    assert result.exit_code == -11


async def an_unknown_program_exits_127(machine: Machine) -> None:
    result = await machine.exec(["no-such-program"], timeout_s=DEADLINE_S)
    assert result.exit_code == 127
    assert b"no-such-program" in result.stderr


async def stdin_is_empty(machine: Machine) -> None:
    assert await sh(machine, "wc -c | tr -d ' '; readlink /proc/self/fd/0") == "0\n/dev/null\n"


async def cwd_and_environment_are_as_asked(machine: Machine) -> None:
    await sh(machine, "mkdir -p /work/sub")
    said = await sh(machine, 'pwd; echo "$A|$HOME"', cwd="sub", env={"A": "x y=z"})
    assert said == "/work/sub\nx y=z|/home/agent\n"
    missing = await machine.exec(["pwd"], cwd="/nowhere", timeout_s=DEADLINE_S)
    assert missing.exit_code == 126


async def programs_run_without_root(machine: Machine) -> None:
    assert await sh(machine, "id -u") == "1000\n"
    assert await sh(machine, "touch /usr/x 2>/dev/null || echo refused") == "refused\n"


async def there_is_no_network_and_nothing_of_the_host(machine: Machine) -> None:
    interfaces = await sh(machine, "cut -d: -f1 -s /proc/net/dev | tr -d ' '")
    assert interfaces.split() == ["lo"]
    assert await sh(machine, f"test -e {__file__} || echo absent") == "absent\n"


async def only_allowed_hosts_are_reached_and_all_is_on_record(machine: Machine) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nhello")
        writer.close()

    fetch = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())"
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        sandbox = networked(machine)
        opt_in = {} if isinstance(machine, RemoteSandbox) else {"allows_addresses": True}
        for _ in range(2):  # whoever asks again changes nothing
            await sandbox.allow_egress([f"good.test:{port}@127.0.0.1"], **opt_in)
        script = f'python3 -c "$0" http://good.test:{port}/; python3 -c "$0" http://evil.test/ 2>&1'
        done = await machine.exec(["sh", "-c", script, fetch], timeout_s=DEADLINE_S)
    assert done.stdout.startswith(b"hello\n"), done
    assert b"HTTP Error 403: Forbidden" in done.stdout
    attempts = [(one.target, one.is_allowed) for one in await sandbox.egress_attempts()]
    assert attempts == [(f"good.test:{port}", True), ("evil.test:80", False)]
    with pytest.raises(SandboxRequestError, match="expected name:port"):
        await sandbox.allow_egress(["127.0.0.1:80"])


async def exec_ends_with_its_leader(machine: Machine) -> None:
    # A background child keeps stdout open for ever; the reply must not wait for it.
    assert await sh(machine, "sleep 1000 & echo started") == "started\n"


async def the_deadline_kills_the_whole_group(machine: Machine) -> None:
    script = "echo before; sleep 1000 & echo $! > pid; sleep 1000"
    result = await until_begun(machine, ["sh", "-c", script])
    assert result.exit_code == -9
    assert result.stdout == b"before\n"
    await until_fails(machine, "kill -0 $(cat pid)")


async def a_flood_of_output_is_bounded(machine: Machine) -> None:
    result = await until_begun(machine, ["yes"], output_bytes_max=1000)
    assert result.truncated
    assert len(result.stdout) == 1000
    exact = await machine.exec(["printf", "12345"], timeout_s=DEADLINE_S, output_bytes_max=5)
    assert (exact.stdout, exact.truncated) == (b"12345", False)


async def eight_commands_run_side_by_side(machine: Machine) -> None:
    # Each ends only when it sees all eight: one after the other they would never end.
    script = 'touch m$0; while [ "$(ls m* | wc -l)" -lt 8 ]; do sleep 0.01; done; echo $0'
    runs = [machine.exec(["sh", "-c", script, str(i)], timeout_s=DEADLINE_S) for i in range(8)]
    results = await asyncio.gather(*runs)
    assert [r.stdout for r in results] == [f"{i}\n".encode() for i in range(8)]


async def an_op_key_runs_once(machine: Machine) -> None:
    argv = ["sh", "-c", "echo run >> runs; sleep 0.1; wc -l < runs"]
    asked = [machine.exec(argv, timeout_s=DEADLINE_S, op_key="k1") for _ in range(3)]
    results = await asyncio.gather(*asked)
    results.append(await machine.exec(argv, timeout_s=DEADLINE_S, op_key="k1"))
    assert {r.stdout for r in results} == {b"1\n"}
    other = await machine.exec(argv, timeout_s=DEADLINE_S, op_key="k2")
    assert other.stdout == b"2\n"


async def a_cancelled_call_kills_its_program(machine: Machine) -> None:
    script = "echo $$ > pid; exec sleep 1000"
    task = asyncio.create_task(machine.exec(["sh", "-c", script], timeout_s=DEADLINE_S))
    await sh(machine, "while ! [ -s pid ]; do sleep 0.01; done")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_fails(machine, "kill -0 $(cat pid)")


async def files_come_back_as_written(machine: Machine) -> None:
    files = {
        "a.py": b"print(1)\n",
        "deep/er/b.bin": bytes(range(256)) * 1500,
        "empty": b"",
        "/tmp/absolute": b"x",
        "\u00fc.txt": b"umlaut",
    }
    await machine.write_files(files)
    for path, data in files.items():
        assert await machine.read_file(path, 1 << 20) == data
    assert await machine.list_files("/work") == ["a.py", "deep/er/b.bin", "empty", "\u00fc.txt"]
    assert await machine.list_files("deep") == ["er/b.bin"]
    assert await sh(machine, "echo more >> a.py; cat a.py") == "print(1)\nmore\n"
    await machine.write_files({"a.py": b"short"})
    assert await machine.read_file("a.py", 3) == b"sho"
    assert await machine.read_file("a.py", 100) == b"short"


async def paths_that_are_no_files_are_refused(machine: Machine) -> None:
    await sh(machine, "mkfifo fifo; mkdir dir; ln -s /dev/zero zero")
    for path in ("absent", "fifo", "dir", "zero"):
        with pytest.raises(SandboxFileError, match=path):
            await machine.read_file(path, 10)
    with pytest.raises(SandboxFileError, match="dir"):
        await machine.write_files({"dir": b""})
    with pytest.raises(SandboxFileError):
        await machine.list_files("absent")


async def a_file_name_need_not_be_text(machine: Machine) -> None:
    await sh(machine, r"touch $(printf 'a\377b')")
    (name,) = await machine.list_files("/work")
    assert name == b"a\xffb".decode(errors="surrogateescape")
    await machine.write_files({name: b"text"})
    assert await machine.read_file(name, 100) == b"text"
    result = await machine.exec(["rm", "--", name], timeout_s=DEADLINE_S)
    assert (result.exit_code, await machine.list_files("/work")) == (0, [])


async def large_arguments_pass_through_the_narrow_line(machine: Machine) -> None:
    argument = "x" * 100_000
    result = await machine.exec(["printf", "%s", argument], timeout_s=DEADLINE_S)
    assert result.stdout == argument[:65536].encode()


async def senseless_requests_are_refused(machine: Machine) -> None:
    with pytest.raises(SandboxRequestError):
        await machine.exec([], timeout_s=DEADLINE_S)
    with pytest.raises(SandboxRequestError):
        await machine.exec(["true", "a\0b"], timeout_s=DEADLINE_S)
    with pytest.raises(SandboxRequestError):
        await machine.exec(["true"], timeout_s=DEADLINE_S, op_key="k" * 65)
    assert await sh(machine, "echo fine") == "fine\n"


async def a_full_disk_is_said_and_survived(machine: Machine) -> None:
    fill = await machine.exec(["sh", "-c", "cat /dev/zero > big"], timeout_s=DEADLINE_S)
    assert fill.exit_code != 0
    with pytest.raises(SandboxFileError) as caught:
        await machine.write_files({"more": bytes(100_000)})
    assert "more" in str(caught.value)
    assert await sh(machine, "rm big; echo fine > ok; cat ok") == "fine\n"


FILL_SYSTEM_V = """
import ctypes, errno, struct
libc = ctypes.CDLL(None, use_errno=True)
message = struct.pack("l2048x", 1)
queues = sent = sets = 0
while queues < 40 and (queue := libc.msgget(queues + 1, 0o1600)) >= 0:
    queues += 1
    while libc.msgsnd(queue, message, 0, 0o4000) == 0:
        sent += 1
print(queues, errno.errorcode[ctypes.get_errno()], sent)
while sets < 40 and libc.semget(sets + 1, 250, 0o1600) >= 0:
    sets += 1
print(sets, errno.errorcode[ctypes.get_errno()])
queue = libc.msgget(1, 0)
libc.msgctl(queue, 0, None)
queue = libc.msgget(1, 0o1600)
print(libc.msgsnd(queue, message, 2048, 0o4000), libc.msgsnd(queue, message, 2048, 0o4000))
"""


async def queues_and_semaphores_of_system_v_are_bounded(machine: Machine) -> None:
    if machine.info.backend == "process":
        return  # The host's own kernel has them.
    said = await sh(machine, f"python3 -c '{FILL_SYSTEM_V}'")
    (queues, refused, sent), (sets, too_many), fit = map(str.split, said.splitlines())
    assert (refused, too_many, fit) == ("ENOSPC", "ENOSPC", ["0", "-1"])
    assert int(queues) >= 4 and int(sent) == 2048 * int(queues) and int(sets) == 8


SECRET = "/tests/secret/answer"
SPY = f"cat {SECRET}; ls -A /tests/secret; echo x > /tests/secret/own; kill -9 $PPID"
"""What code under test would try."""


async def tests_run_apart_from_the_code(machine: Machine) -> None:
    tester = verifying(machine)
    if machine.info.backend == "process":
        with pytest.raises(SandboxRequestError, match="one user"):
            await tester.verify(VerifierRun(argv=["true"], peer=["true"], timeout_s=DEADLINE_S))
        with pytest.raises(SandboxRequestError, match="one user"):
            await tester.write_verifier_files({SECRET: b"42"})
        return
    await tester.write_verifier_files({SECRET: b"42"})
    await machine.write_files({"empty": b""})
    ask = f"echo go >&3; head -c 2000 <&3; echo; cat {SECRET}; id -u; wc -c < /etc/hostname"
    code = f"read go <&3; (({SPY}; id -u; wc -c < /etc/hostname) 2>&1) >&3; exec 3>&-"
    run = VerifierRun(
        argv=["bash", "-c", ask],
        peer=["bash", "-c", code],
        covers=[("/work/empty", "/etc/host[mn]*"), ("/work/empty", "/nowhere/*/x")],
        timeout_s=DEADLINE_S,
    )
    done = await tester.verify(run)
    *spied, uid, covered = done.stdout.decode().split("\n\n")[0].split("\n")
    assert (uid, covered) == ("1000", "0")
    assert len(spied) == 4, spied
    assert all("denied" in line or "not permitted" in line for line in spied), spied
    assert done.stdout.decode().endswith("\n421001\n3\n")
    covered = VerifierRun(
        argv=["wc", "-c", "/etc/hostname"], covers=run.covers, timeout_s=DEADLINE_S
    )
    assert (await tester.verify(covered)).stdout == b"0 /etc/hostname\n"
    assert await sh(machine, "wc -c < /etc/hostname") == "3\n"


async def after_close_every_call_fails(machine: Machine) -> None:
    running = asyncio.create_task(machine.exec(["sleep", "1000"], timeout_s=1000))
    await sh(machine, "true")
    await machine.close()
    await machine.close()
    assert not machine.alive
    with pytest.raises(SandboxDied):
        await running
    with pytest.raises(SandboxDied):
        await machine.read_file("x", 1)


CHECKS = (
    record_names_what_ran,
    exec_gives_both_streams_and_the_exit_code,
    a_signal_gives_its_negative_number,
    an_unknown_program_exits_127,
    stdin_is_empty,
    cwd_and_environment_are_as_asked,
    programs_run_without_root,
    there_is_no_network_and_nothing_of_the_host,
    only_allowed_hosts_are_reached_and_all_is_on_record,
    exec_ends_with_its_leader,
    the_deadline_kills_the_whole_group,
    a_flood_of_output_is_bounded,
    eight_commands_run_side_by_side,
    an_op_key_runs_once,
    a_cancelled_call_kills_its_program,
    files_come_back_as_written,
    paths_that_are_no_files_are_refused,
    a_file_name_need_not_be_text,
    large_arguments_pass_through_the_narrow_line,
    senseless_requests_are_refused,
    a_full_disk_is_said_and_survived,
    queues_and_semaphores_of_system_v_are_bounded,
    tests_run_apart_from_the_code,
    after_close_every_call_fails,
)


async def check_sandbox(factory: Factory) -> None:
    """Run every check, each on a fresh machine."""
    for check in CHECKS:
        machine = await factory()
        try:
            await check(machine)
        finally:
            await machine.close()
