"""What is on record of programs' attempts: while they last, and however many they are."""

import asyncio
import socket

import pytest
from tests.contract.egress.egress_world import Program, echo, get, page, proxy_to, serving
from tests.trajectories import trajectory

from penstock.actors.judge.audit import audit
from penstock.envs.egress.account import STILL_OPEN
from penstock.envs.egress.record import UNRECORDED, EgressRecord
from penstock.envs.tasks.storage import GradedTask
from penstock.messages.reward import CheatKind
from penstock.messages.rollout import EgressAttempt, EpisodeEnd
from penstock.messages.task import HiddenTests, Purpose, Split, Task

TASK = GradedTask(
    task=Task(task_id="t", category="bug", split=Split.TRAIN, instruction="", files={}),
    hidden=HiddenTests(task_id="t", files={}, argv=["true"], expected=["1"]),
)


def findings(attempts):
    rollout = trajectory(
        rollout_id="r", group_id="g", group_index=0, group_size=1, member=0,
        purpose=Purpose.TRAIN, task_id="t", category="bug", end=EpisodeEnd.FINISHED, turns=[],
        egress=attempts,
    )  # fmt: skip
    return audit(rollout, TASK)


def refused(number):
    return EgressAttempt(
        method="GET", target=f"h{number}.test:80", is_allowed=False, reason="not on the allow-list"
    )


async def until(condition):
    async with asyncio.timeout(10.0):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_connection_is_on_record_while_it_is_open():
    async with serving(echo) as (port, heard):
        proxy = proxy_to(port)
        connect = f"CONNECT good.test:{port} HTTP/1.1\r\nhost: x\r\n\r\n".encode()
        serving_it = asyncio.create_task(proxy.serve(Program(connect + b"secret")))
        await until(lambda: heard)
        (line,) = proxy.account.attempts
        assert (line.method, line.target) == ("CONNECT", f"good.test:{port}")
        assert (line.is_allowed, line.reason, line.num_bytes_sent) == (True, STILL_OPEN, 6)
        serving_it.cancel()
        await asyncio.gather(serving_it, return_exceptions=True)
    (line,) = proxy.account.attempts
    assert line.is_allowed and line.reason != STILL_OPEN


async def test_an_allowed_name_that_is_looked_up_is_no_refused_one():
    looked_up = asyncio.Event()

    async def resolve(name, port):
        looked_up.set()
        return await asyncio.sleep(60, [])

    proxy = proxy_to(80, resolve)
    serving_it = asyncio.create_task(proxy.serve(Program(get("http://name.test/"))))
    await looked_up.wait()
    assert findings(proxy.account.attempts) == []
    serving_it.cancel()
    await asyncio.gather(serving_it, return_exceptions=True)


async def test_allowed_attempts_take_no_room_of_refused_ones():
    async with serving(page) as (port, _):
        proxy = proxy_to(port, attempts_max=3, lines_max=2)
        for path in range(5):
            await proxy.serve(Program(get(f"http://good.test:{port}/{path}")))
        program = Program(get("http://evil.test/"))
        await proxy.serve(program)
    assert program.said.startswith(b"HTTP/1.1 403 ")
    attempts = proxy.account.attempts
    assert [line.num_attempts for line in attempts] == [3, 2, 1]
    assert attempts[-1].target == "evil.test:80"
    assert any("evil.test:80" in one.detail for one in findings(attempts))


def test_alike_attempts_are_one_line_with_their_bytes():
    one = EgressAttempt(
        method="GET", target="a.test:80", is_allowed=True, num_bytes_sent=2, num_bytes_received=3
    )
    (line,) = EgressRecord([one, one, one]).lines
    assert (line.num_attempts, line.num_bytes_sent, line.num_bytes_received) == (3, 6, 9)


@pytest.mark.parametrize("num", [129, 400])
def test_what_finds_no_room_is_counted_and_found(num):
    lines = EgressRecord(refused(number) for number in range(num)).lines
    assert len(lines) == 129
    assert (lines[0].reason, lines[0].num_attempts) == (UNRECORDED, num - 128)
    assert any(UNRECORDED in one.detail for one in findings(lines))


def test_records_add_up_over_machines():
    first = EgressRecord([refused(1), refused(2), refused(3)], lines_max=2).lines
    both = EgressRecord([*first, refused(1), refused(4)], lines_max=2).lines
    assert [(line.target, line.num_attempts) for line in both] == [
        ("", 2), ("h1.test:80", 2), ("h2.test:80", 1),
    ]  # fmt: skip


def test_a_programs_words_do_not_swell_the_record():
    wordy = EgressAttempt(method="G" * 9000, target="", is_allowed=False, reason="r" * 9000)
    (line,) = EgressRecord([wordy]).lines
    assert len(line.method) + len(line.reason) < 200
    assert findings([line])[0].kind is CheatKind.EGRESS


async def test_a_stalled_hosts_socket_is_let_go():
    num_received = 0
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    listener.setblocking(False)
    with listener:
        port = listener.getsockname()[1]
        proxy = proxy_to(port, connection_s_max=0.5)
        body = b"x" * (12 << 20)
        head = f"POST http://good.test:{port}/ HTTP/1.1\r\nhost: good.test\r\n"
        program = Program(f"{head}content-length: {len(body)}\r\n\r\n".encode(), body)
        serving_it = asyncio.create_task(proxy.serve(program))
        loop = asyncio.get_running_loop()
        there, _ = await loop.sock_accept(listener)
        with there:
            await serving_it
            there.setblocking(False)
            async with asyncio.timeout(10.0):
                while data := await loop.sock_recv(there, 1 << 20):
                    num_received += len(data)
    assert num_received < len(body)  # the rest did not wait in the host for room


async def test_headers_of_one_hop_are_not_passed_on():
    async with serving(page) as (port, heard):
        lines = ("connection: X-Hop, keep-alive", "x-hop: secret", "x-kept: yes")
        await proxy_to(port).serve(Program(get(f"http://good.test:{port}/a?", *lines)))
    head = heard[0].lower()
    assert head.startswith(b"get /a? http/1.1\r\n")
    assert b"x-hop" not in head and b"x-kept: yes" in head
