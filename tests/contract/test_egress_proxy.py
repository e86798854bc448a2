"""The proxy against real local servers, a program's bytes coming from a queue."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from penstock.envs.egress.account import EgressLimits
from penstock.envs.egress.proxy import EgressProxy
from penstock.envs.egress.rules import parse_rules
from penstock.envs.egress.streams import PIECE_BYTES_MAX, GuestStreams, StreamLie
from penstock.envs.sandbox import SandboxError

PAGE = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello"


class Program:
    """A program's end of a connection."""

    def __init__(self, *pieces):
        self.pieces, self.said = list(pieces), b""

    async def receive(self):
        return self.pieces.pop(0) if self.pieces else await asyncio.sleep(60, b"")

    async def send(self, data):
        self.said += data


@asynccontextmanager
async def serving(answer):
    """Serve on a local port; yield the port and the list of what was received."""
    heard = []

    tasks = set()

    async def serve(reader, writer):
        tasks.add(asyncio.current_task())
        try:
            heard.append(await reader.read(65536))
            await answer(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], heard
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def page(reader, writer):
    writer.write(PAGE)


async def echo(reader, writer):
    writer.write(b"first")
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


def proxy_to(port, resolve=None, **limits):
    rules = parse_rules([f"good.test:{port}@127.0.0.1", f"name.test:{port}"])
    return EgressProxy(rules, EgressLimits(**limits), resolve)


def get(url, *lines):
    return "\r\n".join([f"GET {url} HTTP/1.1", "host: whatever", *lines, "", ""]).encode()


def one(proxy):
    (attempt,) = proxy.account.attempts
    return attempt


async def test_an_allowed_page_comes_through_and_is_on_record():
    async with serving(page) as (port, heard):
        proxy = proxy_to(port)
        program = Program(get(f"http://good.test:{port}/a?b=c", "proxy-authorization: secret"))
        await proxy.serve(program)
    assert program.said == PAGE
    head = heard[0].decode().lower()
    assert head.startswith("get /a?b=c http/1.1\r\n")
    assert f"host: good.test:{port}\r\n" in head and "whatever" not in head
    assert "proxy-authorization" not in head
    attempt = one(proxy)
    assert (attempt.method, attempt.target, attempt.is_allowed) == (
        "GET",
        f"good.test:{port}",
        True,
    )
    assert (attempt.num_bytes_sent, attempt.num_bytes_received) == (len(heard[0]), len(PAGE))


async def test_a_tunnel_carries_both_ways():
    async with serving(echo) as (port, heard):
        proxy = proxy_to(port)
        connect = f"CONNECT good.test:{port} HTTP/1.1\r\nhost: x\r\n\r\n".encode()
        program = Program(connect + b"begin", b"more", b"")
        await proxy.serve(program)
    assert heard[0].startswith(b"begin")
    assert program.said.startswith(b"HTTP/1.1 200 ")
    assert b"first" in program.said
    assert one(proxy).is_allowed


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (get("http://evil.test/"), "not on the allow-list"),
        (b"CONNECT evil.test:443 HTTP/1.1\r\nhost: x\r\n\r\n", "not on the allow-list"),
        (b"CONNECT good.test:22 HTTP/1.1\r\nhost: x\r\n\r\n", "not on the allow-list"),
        (b"CONNECT 127.0.0.1:80 HTTP/1.1\r\nhost: good.test\r\n\r\n", "not an address"),
        (get("http://2130706433/"), "not an address"),
        (get("http://good.test@evil.test/"), "not an address or a malformed name"),
        (get("https://good.test/"), "expected CONNECT"),
    ],
)
async def test_another_target_is_refused_in_words_and_on_record(head, reason):
    proxy = proxy_to(1)
    program = Program(head)
    await proxy.serve(program)
    assert program.said.startswith(b"HTTP/1.1 403 Forbidden\r\n")
    assert reason in program.said.decode()
    assert not one(proxy).is_allowed and reason in one(proxy).reason


async def test_a_redirect_is_given_and_not_followed():
    async def redirect(reader, writer):
        writer.write(b"HTTP/1.1 302 Found\r\nlocation: http://evil.test/\r\n\r\n")

    async with serving(redirect) as (port, _):
        proxy = proxy_to(port)
        first, second = Program(get(f"http://good.test:{port}/")), Program(get("http://evil.test/"))
        await proxy.serve(first)
        await proxy.serve(second)
    assert b"302 Found" in first.said and b"403 Forbidden" in second.said
    assert [one.is_allowed for one in proxy.account.attempts] == [True, False]


async def test_nothing_rides_behind_an_allowed_request():
    behind = get("http://evil.test/steal")
    async with serving(page) as (port, heard):
        proxy = proxy_to(port)
        post = f"POST http://good.test:{port}/ HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nbody"
        await proxy.serve(Program(post.encode() + behind, behind))
    assert heard[0].endswith(b"body") and b"evil" not in b"".join(heard)


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "10.0.0.1", "::1"])
async def test_a_name_that_leads_inside_is_refused(address):
    async def resolve(name, port):
        return [address]

    proxy = proxy_to(80, resolve)
    program = Program(get("http://name.test/"))
    await proxy.serve(program)
    assert b"403 Forbidden" in program.said and b"not public" in program.said
    assert not one(proxy).is_allowed


async def test_a_name_is_resolved_once():
    answers = [["93.184.215.14"], ["127.0.0.1"]]

    async def resolve(name, port):
        return answers.pop(0)

    proxy = proxy_to(80, resolve, connect_s_max=0.01)
    await proxy.serve(Program(get("http://name.test/")))
    assert answers == [["127.0.0.1"]]


@pytest.mark.parametrize("bad", [b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"A" * 20_000])
async def test_what_is_no_request_is_refused(bad):
    proxy = proxy_to(1)
    program = Program(bad, b"\r\n\r\n", b"")
    await proxy.serve(program)
    assert program.said.startswith(b"HTTP/1.1 400 ")
    assert "malformed" in one(proxy).reason


async def test_a_host_that_does_not_answer_is_told_apart_from_a_denied_one():
    async with serving(page) as (port, _):
        pass
    proxy = proxy_to(port)
    program = Program(get(f"http://good.test:{port}/"))
    await proxy.serve(program)
    assert program.said.startswith(b"HTTP/1.1 502 ")
    assert one(proxy).is_allowed and "cannot connect" in one(proxy).reason


async def test_bytes_are_bounded_over_all_connections():
    async def flood(reader, writer):
        writer.write(bytes(200_000))

    async with serving(flood) as (port, _):
        proxy = proxy_to(port, bytes_max=100_000)
        programs = [Program(get(f"http://good.test:{port}/")) for _ in range(2)]
        for program in programs:
            await proxy.serve(program)
    assert sum(len(program.said) for program in programs) < 101_000
    assert all("100000 bytes" in attempt.reason for attempt in proxy.account.attempts)
    assert programs[1].said.startswith(b"HTTP/1.1 429 ")


async def test_connections_and_attempts_are_bounded():
    async with serving(page) as (port, _):
        proxy = proxy_to(port, connections_max=1, attempts_max=2)
        waiting = asyncio.create_task(proxy.serve(Program()))
        await asyncio.sleep(0)
        second = Program(get(f"http://good.test:{port}/"))
        await proxy.serve(second)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        rest = [Program(get("http://evil.test/")) for _ in range(3)]
        for program in rest:
            await proxy.serve(program)
    assert b"429 Too Many" in second.said
    assert len(proxy.account.attempts) == 2 and proxy.account.num_unrecorded == 2
    assert b"429 Too Many" in rest[-1].said


async def test_a_connection_that_never_ends_is_ended():
    async def silent(reader, writer):
        await asyncio.sleep(60)

    async with serving(silent) as (port, _):
        proxy = proxy_to(port, connection_s_max=0.05)
        program = Program(get(f"http://good.test:{port}/"))
        await proxy.serve(program)
    assert program.said.startswith(b"HTTP/1.1 502 ") and "too long" in one(proxy).reason


class DeadLine:
    """A line that takes requests and answers none."""

    async def call(self, request, *, timeout_s):
        raise SandboxError("gone")

    def post(self, request):
        pass


async def test_a_lying_agent_s_pieces_are_not_held():
    async def never(stream):
        await asyncio.sleep(60)

    for pieces in ([bytes(PIECE_BYTES_MAX + 1)], [b"x", b"y"], [b"", b"z"]):
        streams = GuestStreams(DeadLine(), never)
        with pytest.raises(StreamLie):
            for piece in pieces:
                streams.take(1, piece)
        await streams.close()
    streams = GuestStreams(DeadLine(), never)
    with pytest.raises(StreamLie, match="more than 64"):
        for number in range(1, 66):
            streams.take(number, b"x")
    await streams.close()
