"""The proxy against real local servers, a program's bytes coming from a queue."""

import asyncio

import pytest
from tests.contract.egress.egress_world import PAGE, Program, echo, get, page, proxy_to, serving

from penstock.envs.egress.streams import PIECE_BYTES_MAX, GuestStreams, StreamProtocolError
from penstock.envs.sandbox import SandboxError


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
        head = f"POST http://good.test:{port}/ HTTP/1.1\r\nhost: good.test\r\n"
        post = f"{head}content-length: 4\r\n\r\nbody"
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
        proxy = proxy_to(port, connections_max=1, attempts_max=1)
        waiting = asyncio.create_task(proxy.serve(Program()))
        await asyncio.sleep(0)
        programs = [Program(get(f"http://good.test:{port}/")) for _ in range(3)]
        await proxy.serve(programs[0])
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        for program in programs[1:]:
            await proxy.serve(program)
    assert [program.said[:12] for program in programs] == [
        b"HTTP/1.1 429", b"HTTP/1.1 200", b"HTTP/1.1 429",
    ]  # fmt: skip
    assert "more than 1 connections" in proxy.account.attempts[0].reason
    assert "more than 1 attempts" in proxy.account.attempts[-1].reason


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
        with pytest.raises(StreamProtocolError):
            for piece in pieces:
                streams.take(1, piece)
        await streams.close()
    streams = GuestStreams(DeadLine(), never)
    with pytest.raises(StreamProtocolError, match="more than 64"):
        for number in range(1, 66):
            streams.take(number, b"x")
    await streams.close()


async def test_a_program_may_speak_after_one_that_came_later():
    heard = []

    async def note(stream):
        heard.append(await stream.receive())

    streams = GuestStreams(DeadLine(), note)
    for number, piece in ((2, b"second"), (1, b"first"), (3, b"third")):
        streams.take(number, piece)
        await asyncio.sleep(0.01)
    streams.take(2, b"late")  # it has ended: nobody hears that
    await streams.close()
    assert heard == [b"second", b"first", b"third"]
