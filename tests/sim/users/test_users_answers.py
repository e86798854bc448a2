"""Services that answer users with anything but a completion: a failed request, never an end."""

import asyncio
import contextlib
import os

import pytest
from tests.lab.simulate.users import latency
from tests.lab.simulate.users.client import UserClient, connect
from tests.lab.simulate.users.command import _kept
from tests.lab.simulate.users.people import Person
from tests.lab.simulate.users.results import Results
from tests.lab.simulate.users.settings import UsersScenario

from penstock.messages.errors import ConfigError, DeadlineError

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n"
NAMED = STREAM + b"x-request-id: a\r\nx-policy-version: "
JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
ANSWERS = {
    "a stream that is cut": NAMED + b"1\r\ntransfer-encoding: chunked\r\n\r\n5\r\ndata:",
    "a stream of no JSON": NAMED + b"1\r\n\r\ndata: {oops\n\n",
    "no names": STREAM + b"\r\ndata: [DONE]\n\n",
    "a version that is no number": NAMED + b"one\r\n\r\ndata: [DONE]\n\n",
    "an error": b"HTTP/1.1 500 no\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
    "a redirect to itself": b"HTTP/1.1 302 no\r\nlocation: /v1/chat/completions\r\n\r\n",
    "a page": JSON.replace(b"application/json", b"text/html") + b"<html>",
    "an empty object": JSON + b"{}",
    "a list": JSON + b"[]",
    "no choices": JSON + b'{"id": "a", "choices": []}',
    "a choice that is none": JSON + b'{"id": "a", "choices": [null]}',
    "no JSON": JSON + b"{",
    "no HTTP": b"SSH-2.0-x\r\n",
    "silence": b"",
}


@contextlib.asynccontextmanager
async def serving(answer):
    async def serve(reader, writer):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@pytest.mark.parametrize("name", ANSWERS)
async def test_what_is_no_completion_is_a_failed_request(name, monkeypatch):
    monkeypatch.setattr("tests.lab.simulate.users.client.now_real", contextlib.nullcontext)
    person = Person(name="n", tenant="t", taste=0, leaning=0.5, phase=0.0)
    async with serving(ANSWERS[name]) as url, connect(url, "x") as client:
        assert await latency._ask(client, "hello", "u") is None
        users = UserClient(url, {"t": "x"})
        assert await users.ask(person, "sort") is None
        assert (users.num_requests, users.num_failed) == (1, 1)
        await users.close()


async def test_a_service_that_never_answers_ends_the_wait(monkeypatch):
    monkeypatch.setattr(latency, "START_S_MAX", 0.2)
    monkeypatch.setattr(latency, "RETRY_S", 0.01)
    async with serving(ANSWERS["an error"]) as url, connect(url, "x") as client:
        with pytest.raises(DeadlineError, match=r"simulate users: no reply in 0\.2 s"):
            await asyncio.wait_for(latency._until_answered(client, 0.0), 60.0)


DAMAGES = {
    "a pipe": os.mkfifo,
    "a folder": lambda path: path.mkdir(),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a large file": lambda path: path.write_bytes(bytes((1 << 20) + 1)),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_results_that_cannot_be_read_are_refused_by_name(tmp_path, name):
    DAMAGES[name](tmp_path / "aa.json")
    with pytest.raises(ConfigError, match=r"aa\.json: "):
        Results(UsersScenario(), tmp_path).read("aa", dict)


def test_a_result_whose_failures_are_no_number_is_refused(tmp_path):
    results = Results(UsersScenario(), tmp_path)
    results.write("aa", {"failed_requests": "many"})
    with pytest.raises(ConfigError, match=r"aa\.json: failed_requests: expected a number"):
        _kept("aa", lambda _: {}, results)(UsersScenario())
