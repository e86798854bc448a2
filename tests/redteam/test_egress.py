"""Programs that want more of the network than their task's allow-list."""

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.egress.egress_world import Program, echo, get, page, serving

from penstock.envs.egress.account import EgressLimits
from penstock.envs.egress.proxy import (
    ALERT,
    HELLO_BYTES_MAX,
    EgressFailedError,
    EgressProxy,
    check_hello,
)
from penstock.envs.egress.rules import EgressDeniedError, check_addresses, parse_rules

NAME = "good.test"
OUTSIDE = "93.184.215.14"


def hello_of(name: str | None) -> bytes:
    """Return what OpenSSL says first."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


HELLO = hello_of(NAME)


def made(extensions: bytes) -> bytes:
    body = b"\x03\x03" + bytes(32) + b"\0" + b"\0\x02\x13\x01" + b"\x01\0"
    body += len(extensions).to_bytes(2, "big") + extensions
    message = b"\x01" + len(body).to_bytes(3, "big") + body
    return b"\x16\x03\x01" + len(message).to_bytes(2, "big") + message


def extension(kind: int, content: bytes) -> bytes:
    return kind.to_bytes(2, "big") + len(content).to_bytes(2, "big") + content


def sni(*names: bytes) -> bytes:
    listed = b"".join(b"\0" + len(name).to_bytes(2, "big") + name for name in names)
    return extension(0, len(listed).to_bytes(2, "big") + listed)


@pytest.mark.parametrize(
    "address",
    ["192.0.0.192", "192.0.0.170", "168.63.129.16", "169.254.169.254", "100.100.100.200",
     "10.0.0.1", "127.0.0.1", "198.18.0.1", "255.255.255.255", "fd00:ec2::254", "fe80::1",
     "::ffff:192.0.0.192", "64:ff9b::c000:c0", "64:ff9b::a83f:8110", "2002:a83f:8110::1",
     "2001:0:4136:e378::1", "2001:db8::1", "3fff::1", "ff02::1", "5f00::1"],
)  # fmt: skip
def test_no_name_leads_to_a_clouds_metadata_or_into_a_private_network(address):
    with pytest.raises(EgressDeniedError, match="not public"):
        check_addresses([OUTSIDE, address])


async def tunnel(*pieces: bytes):
    """Send something through a tunnel; return what the host got, what the program did, a line."""
    async with serving(echo) as (port, heard):
        proxy = EgressProxy(parse_rules([f"{NAME}:{port}"]), EgressLimits(connection_s_max=0.5))

        async def resolved(rule, name, its_port):
            return "127.0.0.1"

        proxy._locate = resolved  # a public name, as far as the rest of the proxy knows
        connect = f"CONNECT {NAME}:{port} HTTP/1.1\r\nhost: x\r\n\r\n".encode()
        program = Program(connect, *pieces, b"")
        await proxy.serve(program)
    return b"".join(heard), program.said, proxy.account.attempts[0]


async def test_the_allowed_name_passes_whole_or_in_pieces():
    hello = hello_of(NAME)
    for pieces in ([hello], [hello[:3], hello[3:100], hello[100:]]):
        heard, _, line = await tunnel(*pieces)
        assert heard.startswith(hello)
        assert line.is_allowed


async def test_a_hello_in_a_thousand_pieces_keeps_no_host_busy():
    pieces = [bytes([one]) for one in HELLO]
    heard, said, line = await tunnel(*pieces)
    assert heard == b""
    assert said.endswith(ALERT)
    assert "pieces" in line.reason


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (hello_of("hidden.test"), "TLS names server 'hidden.test'"),
        (hello_of(f"{NAME}.hidden.test"), "TLS names server"),
        (hello_of(None), "names 0 servers"),
        (made(sni(b"good.test", b"hidden.test")), "names 2 servers"),
        (made(sni(b"good.test") + sni(b"hidden.test")), "names 2 servers"),
        (made(sni(b"good.test") + extension(0xFE0D, b"\0" * 40)), "hides the server's name"),
        (made(sni(b"good.test\0.hidden.test")), "TLS names server"),
        (b"GET / HTTP/1.1\r\nHost: hidden.test\r\n\r\n", "expected TLS"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "expected TLS"),
        (hello_of(NAME)[:40], "ended before"),
        (made(sni(b"good.test"))[:-1] + b"\xff", "TLS names server"),
        (made(extension(0, b"\xff\xff")), "malformed"),
        (b"\x16\x03\x01\x40\x00\x01\xff\xff\xff", "expected a TLS ClientHello"),
    ],
    ids=range(13),
)
async def test_a_tunnel_to_an_allowed_name_fronts_for_no_other(first, reason):
    heard, said, line = await tunnel(first)
    assert heard == b""
    assert said.endswith(ALERT)
    assert not line.is_allowed
    assert reason in line.reason


async def test_a_plain_request_fronts_for_no_other_host():
    async with serving(page) as (port, heard):
        rules = parse_rules([f"{NAME}:{port}@127.0.0.1"], allows_addresses=True)
        proxy = EgressProxy(rules, EgressLimits(connection_s_max=2.0))
        url = f"http://{NAME}:{port}/"
        program = Program(get(url).replace(f"host: {NAME}".encode(), b"host: hidden.test"))
        await proxy.serve(program)
        assert b"403" in program.said
        assert heard == []
        assert "Host header names 'hidden.test" in proxy.account.attempts[0].reason
        honest = Program(get(url))
        await proxy.serve(honest)
        assert honest.said.endswith(b"hello")


async def test_a_length_that_is_said_to_be_of_the_next_hop_is_forwarded():
    async with serving(page) as (port, heard):
        rules = parse_rules([f"{NAME}:{port}@127.0.0.1"], allows_addresses=True)
        url = f"http://{NAME}:{port}/"
        request = get(url, "connection: content-length", "content-length: 5")
        program = Program(request.replace(b"GET", b"POST") + b"hello")
        await EgressProxy(rules, EgressLimits(connection_s_max=2.0)).serve(program)
        assert program.said.endswith(b"hello")
        assert b"content-length: 5" in heard[0]


async def test_a_name_is_resolved_once_and_cannot_move_after_its_check():
    answers, connected = iter([[OUTSIDE], ["127.0.0.1"]]), []

    async def rebinding(name, port):
        return next(answers)

    async def connect(address, port):
        connected.append(address)
        raise EgressFailedError("far away")

    proxy = EgressProxy(parse_rules([f"{NAME}:80"]), EgressLimits(), rebinding)
    proxy._connect = connect
    for _ in range(2):
        await proxy.serve(Program(get(f"http://{NAME}/")))
    assert connected == [OUTSIDE]
    assert [line.reason for line in proxy.account.attempts] == [
        "far away",
        "denied: the name resolves to an address that is not public",
    ]


async def test_a_thousand_refused_targets_are_a_bounded_record():
    proxy = EgressProxy(parse_rules([f"{NAME}:80"]), EgressLimits())
    for n in range(1000):
        await proxy.serve(Program(get(f"http://evil{n}.test/")))
    lines = proxy.account.attempts
    assert len(lines) <= 2 * proxy.account.limits.lines_max + 1
    assert sum(line.num_attempts for line in lines) == 1000


@given(st.binary(max_size=300), st.integers(0, 400), st.booleans())
def test_any_first_bytes_are_more_to_come_or_a_typed_refusal(noise, at, starts_well):
    data = (HELLO[:at] if starts_well else b"") + noise
    try:
        check_hello(data, NAME)
    except EgressDeniedError as denied:
        assert str(denied)


def test_a_hello_without_end_is_refused_in_time():
    record = b"\x16\x03\x01\x00\x01\x01"  # one byte of a message that never ends
    with pytest.raises(EgressDeniedError):
        check_hello(record * (HELLO_BYTES_MAX + 1), NAME)
